"""Command `lockstep doctor`. Owns the choice of hosts and the output."""

import dataclasses
import math
import os
import socket
from pathlib import Path
from typing import Any

import click

from services.commands.checks import check_results
from services.commands.checks.check_results import Verdict
from services.commands.cli.click_support import Command, json_option, json_text
from services.commands.cli.flags import SettingSources, source_options
from services.commands.doctor.checks.names import check_names
from services.commands.doctor.comparing import compare
from services.commands.doctor.examiner import Examiner
from services.commands.doctor.facts import Examination, Finding, HostReport
from services.commands.doctor.remote import (
    DEADLINE_S,
    DEFAULT_COMMAND,
    ask_all,
    command_for,
    settings_flags,
)
from shared.configuration import inventory
from shared.configuration.host_share import HostShare
from shared.configuration.inventory import HostEntry
from shared.errors import UsageError
from shared.os.standard_streams import print_line

_VERDICTS: tuple[Verdict, ...] = ("OK", "CANNOT CHECK", "WARN", "FAIL")
"""By severity."""
_WIDTHS = (len("CANNOT CHECK"),)


@dataclasses.dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Options of `lockstep doctor`."""

    sources: SettingSources
    alone: bool
    """Whether only this host is examined."""
    remote: str | None
    """Template of the command that examines another host; None: ssh."""
    timeout_s: float
    """Deadline for each host's answer."""

    @property
    def inventory_path(self) -> str:
        """Absolute path of the inventory, or "" without one."""
        file = self.sources.inventory
        return str(Path(file).resolve()) if file else ""


@click.command(cls=Command)
@source_options
@click.option("--alone", is_flag=True, help="Examine this host only.")
@click.option(
    "--remote",
    metavar="COMMAND",
    help="Command that examines another host; {ssh}, {name}, {address}, {executable} and "
    "{inventory} are filled in (default: ssh).",
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=float,
    default=DEADLINE_S,
    help="Deadline for each host's answer.",
)
@json_option
def doctor(sources: SettingSources, *, as_json: bool, **options: Any) -> int:
    """Check hosts, cables and settings; the exit code is 1 if a check FAILs."""
    examination = examine(DoctorOptions(sources, **options))
    print_line(json_text(examination) if as_json else render(examination))
    return check_results.exit_code(all_findings(examination))


def examine(options: DoctorOptions) -> Examination:
    """Examine this host or, with an inventory and without `--alone`, all its hosts.

    Raises:
        ConfigError: when configuration or inventory is wrong.
        UsageError: when options contradict each other, or this machine is not a host of the
            inventory.
    """
    sources = options.sources
    if not 0.0 < options.timeout_s < math.inf:
        raise UsageError(
            f"--timeout is {options.timeout_s}: it must be a number of seconds above 0."
        )
    for flag, value in (("host", sources.overrides), ("remote", options.remote)):
        if value and not sources.inventory:
            raise UsageError(f"--{flag} needs --inventory, which lists the hosts.")
    share = _this_host(options)
    if sources.inventory and not options.alone:
        return _examine_all(options, share)
    assert share is not None
    return Examination(hosts=[_examine_here(options, share)], findings=[])


def render(examination: Examination) -> str:
    """Return an examination as text.

    Each host is one block, findings about several hosts are one more, each with the most severe
    finding first; the last line counts the findings per verdict.
    """
    lines: list[str] = []
    for report in examination.hosts:
        facts = report.facts
        versions = ", ".join(f"{k} {v}" for k, v in facts.versions.items() if v)
        lines += [f"{facts.host}: {facts.platform} {facts.system}", f"  {versions}"]
        lines += [_table(report.findings), ""]
    if examination.findings:
        lines += ["all hosts", _table(examination.findings), ""]
    lines.append(check_results.count_verdicts(all_findings(examination), _VERDICTS))
    return "\n".join(lines)


def all_findings(examination: Examination) -> list[Finding]:
    """Return the findings of all hosts, then those about several hosts together."""
    of_hosts = [one for report in examination.hosts for one in report.findings]
    return [*of_hosts, *examination.findings]


def _table(findings: list[Finding]) -> str:
    ordered = sorted(findings, key=lambda one: -_VERDICTS.index(one.verdict))
    return check_results.render(ordered, _WIDTHS, indent=2)


def _this_host(options: DoctorOptions) -> HostShare | None:
    """Return what this host runs; None: it is not in the inventory, and only asks others."""
    sources = options.sources
    try:
        return sources.share()
    except UsageError:
        if sources.inventory and not (sources.config or sources.overrides or options.alone):
            return None
        raise


def _examine_here(options: DoctorOptions, share: HostShare) -> HostReport:
    flags = settings_flags(options.sources.config, options.inventory_path, share.name)
    name = share.name or socket.gethostname()
    return Examiner(share, name, os.environ, flags=flags).examine()


def _examine_all(options: DoctorOptions, share: HostShare | None) -> Examination:
    path = options.inventory_path
    assert options.sources.inventory
    hosts = inventory.read(options.sources.inventory)
    others = [host for host in hosts.hosts if share is None or host.name != share.name]
    template = options.remote or DEFAULT_COMMAND
    commands = {host.name: command_for(template, host, path) for host in others}
    named = [] if options.remote else [host.ssh.rpartition("@")[2] for host in others]
    findings: list[Finding] = check_names(named)
    answers = ask_all(commands, options.timeout_s)
    reports: dict[str, HostReport] = {}
    if share is not None:
        reports[share.name] = _examine_here(options, share)
    for name, answer in answers.items():
        findings += answer.findings.all
        if answer.report is not None:
            reports[name] = answer.report
    in_order = [reports[host.name] for host in hosts.hosts if host.name in reports]
    devices = {host.name: _devices(host) for host in hosts.hosts}
    here = "" if share is None else share.name
    flags = {}
    for host in hosts.hosts:
        own_path = path if host.name == here else host.inventory or path
        flags[host.name] = settings_flags(None, own_path, host.name)
    found = compare([one.facts for one in in_order], devices, hosts.scheduler.name, flags)
    return Examination(hosts=in_order, findings=[*findings, *found.all])


def _devices(host: HostEntry) -> dict[str, list[str]]:
    """Return peer -> the RDMA devices that lead there, as the inventory says."""
    return {
        peer: [devices] if isinstance(devices, str) else list(devices)
        for peer, devices in host.rdma.items()
    }
