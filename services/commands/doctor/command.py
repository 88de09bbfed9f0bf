"""`lockstep doctor`: examines this host, has the others examine themselves, compares them all."""

import argparse
import math
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.commands.doctor.checks.names import check_names
from services.commands.doctor.comparing import compare
from services.commands.doctor.facts import Examination, HostReport
from services.commands.doctor.findings import Finding
from services.commands.doctor.gather import Examiner
from services.commands.doctor.remote import DEFAULT, ask_all, command_for
from services.commands.doctor.shell import settings_flags
from services.commands.doctor.table import all_findings, render
from shared import limits
from shared.configuration import host_selection, inventory
from shared.configuration.host_share import HostShare
from shared.configuration.inventory import HostEntry
from shared.errors import UsageError

EXIT_FOUND = 1


def run(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, int]:
    """Examine; return what to print, and an exit code: 1 if anything FAILs.

    Raises:
        ConfigError: configuration or inventory is wrong.
        UsageError: flags contradict each other, or this machine is no host of the inventory.
    """
    if not (0.0 < options.timeout < math.inf):
        raise UsageError(f"--timeout is {options.timeout}: it must be a number of seconds above 0.")
    for flag in ("host", "remote"):
        if getattr(options, flag) and not options.inventory:
            raise UsageError(f"--{flag} goes with --inventory: hosts stand there.")
    share = _this_host(options, environment)
    if options.inventory and not options.alone:
        examination = _all_hosts(options, environment, share)
    else:
        assert share is not None
        report = _examine(options, environment, share)
        examination = Examination(hosts=[report], findings=[])
    failed = any(one.verdict == "FAIL" for one in all_findings(examination))
    if options.json:
        text = msgspec.json.format(msgspec.json.encode(examination)).decode()
    else:
        text = render(examination)
    return text, EXIT_FOUND if failed else limits.EXIT_OK


def _this_host(options: argparse.Namespace, environment: Mapping[str, str]) -> HostShare | None:
    """Return what this host runs; None: it is no host of the inventory, and only asks others."""
    flags = {"gateway.host": options.host}
    try:
        return host_selection.select_share(options.inventory, options.config, flags, environment)
    except UsageError:
        if options.inventory and not (options.config or options.host or options.alone):
            return None
        raise


def _examine(
    options: argparse.Namespace, environment: Mapping[str, str], share: HostShare
) -> HostReport:
    """Examine this host."""
    file = options.inventory and str(Path(options.inventory).resolve())
    flags = settings_flags(options.config, file, share.name)
    name = share.name or socket.gethostname()
    return Examiner(share, name, environment, flags=flags).examine()


def _all_hosts(
    options: argparse.Namespace, environment: Mapping[str, str], share: HostShare | None
) -> Examination:
    hosts = inventory.read(options.inventory)
    path = str(Path(options.inventory).resolve())
    others = [host for host in hosts.hosts if share is None or host.name != share.name]
    template = options.remote or DEFAULT
    commands = {host.name: command_for(template, host, path) for host in others}
    named = [] if options.remote else [host.ssh.rpartition("@")[2] for host in others]
    findings: list[Finding] = check_names(named)
    answers = ask_all(commands, options.timeout)
    reports: dict[str, HostReport] = {}
    if share is not None:
        reports[share.name] = _examine(options, environment, share)
    for host, answer in answers.items():
        findings += answer.findings.all
        if answer.report is not None:
            reports[host] = answer.report
    in_order = [reports[host.name] for host in hosts.hosts if host.name in reports]
    tables = {host.name: _devices(host) for host in hosts.hosts}
    here = "" if share is None else share.name
    flags = {
        host.name: settings_flags(
            None, path if host.name == here else host.inventory or path, host.name
        )
        for host in hosts.hosts
    }
    found = compare([one.facts for one in in_order], tables, hosts.scheduler.name, flags)
    return Examination(hosts=in_order, findings=[*findings, *found.all])


def _devices(host: HostEntry) -> dict[str, list[str]]:
    """Return peer -> the devices that the inventory says lead there."""
    return {
        peer: [devices] if isinstance(devices, str) else list(devices)
        for peer, devices in host.rdma.items()
    }
