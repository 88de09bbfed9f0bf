"""`lockstep verify`: checks a Lockstep that runs, and prints PASS, FAIL or SKIP for each thing.

It is what an operator runs on machines that nobody else can see, so every FAIL has its remedy.
"""

import argparse
import os
import socket
import sys
from collections.abc import Callable

from services.commands.verify import ending, judging, names, trial
from services.commands.verify.arguments import KEY_VARIABLE
from services.commands.verify.blocks import LongPrompt
from services.commands.verify.checks import Checks
from services.commands.verify.cluster import VerifiedCluster
from services.commands.verify.gateway import Gateway, NoAnswer
from services.commands.verify.lines import Line, has_failed, render, summary, to_json
from services.rank_worker.device import fast_synch
from services.supervisor.console.console import Console
from services.supervisor.status.progress import base_url
from shared import limits
from shared.clock import SystemClock
from shared.configuration.settings import Config
from shared.errors import UnavailableError, UsageError

TIMEOUT_S = 120.0
"""Longest silence of the gateway: a large model's first step compiles."""

EXIT_FAILED = 1

_UNREACHED = (
    "See the FAIL line above; is everything started, and are --config, --host and --port those of "
    "that start?"
)


def run(config: Config, options: argparse.Namespace, console: Console) -> int:
    """Check everything; return 0 when nothing failed, else 1."""
    key = options.api_key or os.environ.get(KEY_VARIABLE, "")
    if not (key.isascii() and key.isprintable()):
        raise UsageError("The API key holds a character that no key has: was it copied whole?")
    address = base_url(config).removeprefix("http://")
    gateway = Gateway(address, config.served_name, key, TIMEOUT_S)
    lines: list[Line] = []

    def say(line: Line) -> None:
        lines.append(line)
        if not options.json:
            console.say(render(line))

    _all(config, options, VerifiedCluster(config, gateway), Console(sys.stderr), say)
    console.say(to_json(lines) if options.json else f"\n{summary(lines)}")
    return EXIT_FAILED if has_failed(lines) else limits.EXIT_OK


def _all(
    config: Config,
    options: argparse.Namespace,
    cluster: VerifiedCluster,
    progress: Console,
    say: Callable[[Line], None],
) -> None:
    checks, prompt = Checks(cluster), LongPrompt(cluster)
    first = performed(names.GATEWAY, checks.ready)
    say(first)
    others = [*checks.listed(), *prompt.listed()]
    if first.verdict == "FAIL":
        for name, _ in others:
            say(Line(check=name, verdict="SKIP", detail="nothing serves"))
    else:
        for name, check in others:
            say(performed(name, check))
    if why := _why_nothing_restarts(options, first):
        for name in (names.CANARY_ANEW, names.RESTORED):
            say(Line(check=name, verdict="SKIP", detail=why))
    else:
        say(performed(names.CANARY_ANEW, lambda: _run_anew(config, cluster, progress)))
        say(performed(names.RESTORED, prompt.restore))
    if options.fast_synch:
        say(performed(names.FAST_SYNCH, lambda: _tried(config, cluster)))
    if options.shutdown:
        say(performed(names.SHUTDOWN, lambda: ending.shut_down(config)))
    else:
        detail = "only with --shutdown, which ends the service"
        say(Line(check=names.SHUTDOWN, verdict="SKIP", detail=detail))


def _why_nothing_restarts(options: argparse.Namespace, first: Line) -> str:
    if not options.restart:
        return "only with --restart, which makes streams pause for some seconds"
    return "nothing serves" if first.verdict == "FAIL" else ""


def _run_anew(config: Config, cluster: VerifiedCluster, progress: Console) -> Line:
    """Have all ranks of the world start anew: none is ready before its canary has been."""
    ending.restart_ranks(config, progress)
    return judging.canary(cluster.status(), names.CANARY_ANEW)


def _tried(config: Config, cluster: VerifiedCluster) -> Line:
    return trial.judge(
        config.world.metal_fast_synch,
        cluster.status().ranks,
        socket.gethostname(),
        fast_synch.file(),
        sys.platform,
    )


def performed(name: str, check: Callable[[], Line]) -> Line:
    """Run one check and time it; what does not answer is its FAIL line."""
    clock = SystemClock()
    began_s = clock.now()
    try:
        line = check()
    except (NoAnswer, UnavailableError) as error:
        line = Line(check=name, verdict="FAIL", detail=str(error), remedy=_UNREACHED)
    return Line(
        check=line.check,
        verdict=line.verdict,
        seconds=round(clock.now() - began_s, 3),
        detail=line.detail,
        remedy=line.remedy,
        notes=line.notes,
    )
