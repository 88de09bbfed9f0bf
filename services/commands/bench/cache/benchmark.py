"""`lockstep bench cache`: its flags and the run of its parts. Measures nothing itself."""

import tempfile
from pathlib import Path

import click

from services.commands.bench.cache import prefix_reuse, session_replay, spilling_cost
from services.commands.bench.cache.testbed import CachePlan, CacheTestbed
from services.commands.bench.flags import (
    BenchmarkOptions,
    names_option,
    number_option,
    numbers_option,
)
from services.commands.bench.load.load_processes import start_closed_loop_client
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring import disk, machine, noise
from services.commands.bench.measuring.processes import print_progress
from services.commands.bench.measuring.report import Report
from services.commands.bench.serving.peers import MLX_LM, start_mlx_lm
from shared.errors import UsageError

SUMMARY = "time that reused prefixes save in memory, on SSD and after a restart, and their cost"
COLUMNS = [*prefix_reuse.COLUMNS, *session_replay.COLUMNS, *spilling_cost.COLUMNS]
PARTS = {part.NAME: part.measure for part in (prefix_reuse, session_replay, spilling_cost)}
DEFAULTS = {
    "parts": list(PARTS),
    "prefixes": [1_024, 4_096, 16_384],
    "turns": 12,
    "tokens": 6_000,
}
QUICK_DEFAULTS = {"parts": list(PARTS), "prefixes": [1_024], "turns": 4, "tokens": 1_500}
_IN_MEMORY = ("tmpfs", "ramfs")
OPTIONS: list[click.Parameter] = [
    names_option("--parts", PARTS, "Parts to run"),
    numbers_option("--prefixes", "Prefix lengths in tokens", shown_default="1024,4096,16384"),
    number_option("--turns", "Requests of the replayed session (default 12)"),
    number_option("--tokens", "Tokens of the session's last request (default 6000)"),
    number_option("--ranks", "World size", 1),
    click.Option(
        ["--directory"],
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Store blocks in a temporary folder inside this folder.",
    ),
    click.Option(
        ["--warm"],
        is_flag=True,
        help="Do not empty the page cache before blocks are read: measures restores without disk.",
    ),
]
"""Options of this benchmark."""


def make_plan(options: BenchmarkOptions) -> CachePlan:
    """Return the cache benchmark's parameters from the options of its command line.

    Raises:
        UsageError: when a setting is malformed or a folder does not exist.
        UnavailableError: when the model of a preset cannot be made.
    """
    arguments = options.arguments
    if arguments.directory is not None and not arguments.directory.is_dir():
        raise UsageError(f"--directory {arguments.directory}: there is no such folder.")
    return CachePlan(
        model=options.model,
        ranks=arguments.ranks,
        parts=arguments.parts,
        prefixes=arguments.prefixes,
        turns=arguments.turns,
        tokens=arguments.tokens,
        repeats=arguments.repeats,
        log_folder=options.logs,
        directory=arguments.directory,
        tries=arguments.tries,
        is_warm=arguments.warm,
        settings=options.settings,
    )


def measure(plan: CachePlan) -> Report:
    """Run the parts named in the plan and return one report with their cases.

    The parts are prefix reuse ("prefixes"), session replay ("replay") and spilling ("decode").

    Raises:
        UnavailableError: when a server does not start or answer.
    """
    prompts = PromptGenerator(plan.model)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-cache-", dir=plan.directory) as name:
        folder = Path(name)
        report = _new_report(plan, folder)
        client = start_closed_loop_client(plan.log_folder)
        peer = start_mlx_lm(plan.model, plan.log_folder)
        try:
            print_progress(f"waiting for {MLX_LM}")
            peer.wait()
            peer.child.pause()
            testbed = CacheTestbed(plan, prompts, client, peer, folder)
            for part in plan.parts:
                PARTS[part](testbed, report)
        finally:
            client.stop()
            peer.child.stop()
    noise.add_noise_note(report)
    return report


def _new_report(plan: CachePlan, folder: Path) -> Report:
    file_system = disk.file_system_type(folder)
    report = Report(
        benchmark="cache",
        machine=machine.describe(),
        settings={
            "model": plan.model.name,
            "ranks": plan.ranks,
            "prefixes": ", ".join(map(str, plan.prefixes)),
            "repeats": f"{plan.repeats}, a third of it above {prefix_reuse.LONG_TOKENS} tokens",
            "file_system": file_system or "unknown",
            "page_cache": _page_cache(plan, folder),
            **plan.settings,
        },
    )
    if file_system in _IN_MEMORY:
        report.notes.append(
            f"The blocks were on {file_system}, which is memory: no SSD was measured. "
            "Name a folder on an SSD with --directory."
        )
    return report


def _page_cache(plan: CachePlan, folder: Path) -> str:
    if plan.is_warm:
        return "kept: blocks and plain reads come from memory"
    if disk.drop_page_cache(folder):
        return "emptied before blocks are read"
    return "not emptied: this system has no call for it, so reads may come from memory"
