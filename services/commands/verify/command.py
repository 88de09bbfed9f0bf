"""Command `lockstep verify`. Owns the order of its checks and its output.

Operators run it on machines that the developers cannot see, so every FAIL has a remedy.
"""

import dataclasses
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
import msgspec

from services.commands.checks import check_results
from services.commands.checks.check_results import Verdict, has_failed
from services.commands.cli.click_support import Command, json_option, json_text
from services.commands.cli.flags import SettingSources, settings_options
from services.commands.cli.running_config import running_config
from services.commands.verify import ending, fast_synch_check, judging
from services.commands.verify.blocks import LongPrompt
from services.commands.verify.cluster_checks import ClusterChecks, VerifiedCluster
from services.commands.verify.gateway import Gateway, NoAnswer
from services.commands.verify.judging import TimedCheck
from services.supervisor.console.console import Console
from services.supervisor.status.progress_text import base_url
from shared.clock import SystemClock
from shared.configuration.settings import Config
from shared.errors import UnavailableError, UsageError
from shared.os import fast_synch
from shared.os.standard_streams import exit_code_if_written

TIMEOUT_S = 120.0
"""Longest silence of the gateway: the first step of a large model compiles."""

SCHEMA = "lockstep.verify/1"
"""Version of the JSON document; changes when a field changes its meaning."""

KEY_VARIABLE = "LOCKSTEP_API_KEY"
"""Environment variable with the API key, in place of `--api-key`."""

_UNREACHED = (
    "See the FAIL line above; is everything started, and are --config, --host and --port those of "
    "that start?"
)
_VERDICTS: tuple[Verdict, ...] = ("PASS", "FAIL", "SKIP")
_WIDTHS = (len("PASS"), 26)
"""Widths of verdict and check: results are printed one by one."""


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Options of `lockstep verify`."""

    api_key: str = ""
    """API key for all requests; "": that of the environment variable, if any."""
    restart: bool = False
    """Whether to restart the ranks, and then check that a prefix is restored from SSD."""
    fast_synch: bool = False
    """Whether to check the proof of Metal's fast synchronization."""
    shutdown: bool = False
    """Whether to end `lockstep up` on this host as the last check."""
    as_json: bool = False
    """Whether to print one JSON document instead of a line per check."""


@click.command(cls=Command)
@settings_options
@json_option
@click.option(
    "--api-key",
    metavar="KEY",
    default="",
    help=f"API key of this server (default: {KEY_VARIABLE}).",
)
@click.option(
    "--restart",
    is_flag=True,
    help="Restart the ranks once, to run the canary again and to see blocks restored from SSD; "
    "streams pause meanwhile.",
)
@click.option(
    "--fast-synch",
    is_flag=True,
    help="Also report whether Metal's fast synchronization is proven on this host.",
)
@click.option(
    "--shutdown",
    is_flag=True,
    help="At the end stop `lockstep up` on this host, which ends the service.",
)
def verify(sources: SettingSources, **options: Any) -> int:
    """Check that a running Lockstep works in every part; the exit code is 1 if a check FAILs."""
    console = Console(sys.stdout)
    code = run(running_config(sources), VerifyOptions(**options), console)
    return exit_code_if_written(code, console.write_error)


def run(config: Config, options: VerifyOptions, console: Console) -> int:
    """Run all checks and print their results; return an exit code, 1 if a check FAILs.

    Args:
        config: settings of the Lockstep to check.
        options: options of the command.
        console: prints the results.

    Raises:
        UsageError: when the API key is malformed.
    """
    key = options.api_key or os.environ.get(KEY_VARIABLE, "")
    if not (key.isascii() and key.isprintable()):
        raise UsageError(
            "The API key holds a character that keys do not have: was it copied completely?"
        )
    address = base_url(config).removeprefix("http://")
    gateway = Gateway(address, config.served_name, key, TIMEOUT_S)
    results: list[TimedCheck] = []

    def report(result: TimedCheck) -> None:
        results.append(result)
        if not options.as_json:
            console.print_line(check_results.render([result], _WIDTHS))

    _run_all(config, options, VerifiedCluster(config, gateway), Console(sys.stderr), report)
    console.print_line(to_json(results) if options.as_json else f"\n{summary(results)}")
    return check_results.exit_code(results)


def _run_all(
    config: Config,
    options: VerifyOptions,
    cluster: VerifiedCluster,
    progress: Console,
    report: Callable[[TimedCheck], None],
) -> None:
    cluster_checks, prompt = ClusterChecks(cluster), LongPrompt(cluster)
    gateway = perform(judging.GATEWAY, cluster_checks.ready)
    report(gateway)
    others = [*cluster_checks.by_name(), *prompt.by_name()]
    if gateway.verdict == "FAIL":
        _skip((name for name, _ in others), "nothing serves", report)
    else:
        for name, check in others:
            report(perform(name, check))
    if why := _why_not_restart(options, gateway):
        _skip((judging.CANARY_ANEW, judging.RESTORED), why, report)
    else:
        report(perform(judging.CANARY_ANEW, lambda: _canary_again(config, cluster, progress)))
        report(perform(judging.RESTORED, prompt.restore))
    if options.fast_synch:
        report(perform(judging.FAST_SYNCH, lambda: _fast_synch(config, cluster)))
    if options.shutdown:
        report(perform(judging.SHUTDOWN, lambda: ending.shut_down(config)))
    else:
        _skip((judging.SHUTDOWN,), "only with --shutdown, which ends the service", report)


def _skip(names: Iterable[str], why: str, report: Callable[[TimedCheck], None]) -> None:
    for name in names:
        report(judging.skipped(name, why))


def _why_not_restart(options: VerifyOptions, gateway: TimedCheck) -> str:
    if not options.restart:
        return "only with --restart, which makes streams pause for some seconds"
    return "nothing serves" if gateway.verdict == "FAIL" else ""


def _canary_again(config: Config, cluster: VerifiedCluster, progress: Console) -> TimedCheck:
    """Restart all ranks; each must pass its canary again before it is ready."""
    ending.restart_ranks(config, progress)
    return judging.canary(cluster.status(), judging.CANARY_ANEW)


def _fast_synch(config: Config, cluster: VerifiedCluster) -> TimedCheck:
    return fast_synch_check.judge_fast_synch(
        config.world.metal_fast_synch,
        cluster.status().ranks,
        socket.gethostname(),
        fast_synch.proof_file(),
        sys.platform,
    )


def perform(name: str, check: Callable[[], TimedCheck]) -> TimedCheck:
    """Run one check and time it.

    Args:
        name: name of the check, for the result if it raises.
        check: runs it.

    Returns:
        Its result with its duration; a FAIL if gateway, scheduler or ranks do not answer.
    """
    clock = SystemClock()
    began_s = clock.now()
    try:
        result = check()
    except (NoAnswer, UnavailableError) as error:
        result = judging.failed(name, str(error), _UNREACHED)
    return msgspec.structs.replace(result, seconds=round(clock.now() - began_s, 3))


def summary(results: Sequence[TimedCheck]) -> str:
    """Return the last line: PASS, or FAIL if any check FAILs, and the count of each verdict."""
    verdict = "FAIL" if has_failed(results) else "PASS"
    return f"{verdict}  {check_results.count_verdicts(results, _VERDICTS)}"


def to_json(results: Sequence[TimedCheck]) -> str:
    """Return the JSON document of `lockstep verify --json`."""
    return json_text({"schema": SCHEMA, "passed": not has_failed(results), "checks": results})
