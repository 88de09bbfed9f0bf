"""`lockstep bench cache`: its flags and the run of its parts. Measures nothing itself."""

import tempfile
from pathlib import Path

import click

from services.commands.bench.cache import prefix_reuse, session_replay, spilling_cost
from services.commands.bench.cache.testbed import CachePlan, CacheTestbed
from services.commands.bench.flags import names_option, number_option, numbers_option
from services.commands.bench.load.load_processes import LoadClient
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring import disk
from services.commands.bench.measuring.report import Report
from services.commands.bench.serving.peers import start_mlx_lm
from shared.errors import UsageError

COLUMNS = [*prefix_reuse.COLUMNS, *session_replay.COLUMNS, *spilling_cost.COLUMNS]
PARTS = {part.NAME: part.measure for part in (prefix_reuse, session_replay, spilling_cost)}
_IN_MEMORY = ("tmpfs", "ramfs")


def _existing(_ctx: click.Context, _option: click.Parameter, folder: Path | None) -> Path | None:
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--directory {folder}: there is no such folder.")
    return folder


OPTIONS: list[click.Parameter] = [
    names_option("--parts", PARTS, "Parts to run"),
    numbers_option("--prefixes", "Prefix lengths in tokens", "1024,4096,16384", quick="1024"),
    number_option("--turns", "Requests of the replayed session", 12, quick=4),
    number_option("--tokens", "Tokens of the session's last request", 6_000, quick=1_500),
    number_option("--ranks", "World size", 1),
    click.Option(
        ["--directory"],
        type=click.Path(path_type=Path),
        callback=_existing,
        metavar="FOLDER",
        help="Store blocks in a temporary folder inside this folder.",
    ),
    click.Option(
        ["--warm", "is_warm"],
        is_flag=True,
        help="Do not empty the page cache before blocks are read: measures restores without disk.",
    ),
]
"""Options of this benchmark."""


def measure(plan: CachePlan, report: Report) -> None:
    """Run the parts named in the plan and add their cases to the report.

    The parts are prefix reuse ("prefixes"), session replay ("replay") and spilling ("decode").

    Args:
        plan: the parameters of the benchmark.
        report: gets the cases and notes of the parts.

    Raises:
        UnavailableError: when a server does not start or answer.
    """
    prompts = PromptGenerator(plan.model)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-cache-", dir=plan.directory) as name:
        folder = Path(name)
        describe(plan, folder, report)
        with (
            LoadClient(plan.log_folder) as client,
            start_mlx_lm(plan.model, plan.log_folder) as peer,
        ):
            peer.wait()
            peer.pause()
            testbed = CacheTestbed(plan, prompts, client, peer, folder)
            for part in plan.parts:
                PARTS[part](testbed, report)


def describe(plan: CachePlan, folder: Path, report: Report) -> None:
    """Add the plan, the file system and the page cache to the settings of a report.

    Args:
        plan: the parameters of the benchmark.
        folder: folder of stored blocks.
        report: gets the settings, and a note if the blocks are in memory.
    """
    file_system = disk.file_system_type(folder)
    page_cache = "not emptied: this system has no call for it, so reads may come from memory"
    if plan.is_warm:
        page_cache = "kept: blocks and plain reads come from memory"
    elif disk.drop_page_cache(folder):
        page_cache = "emptied before blocks are read"
    report.settings |= {
        "model": plan.model.name,
        "ranks": plan.ranks,
        "prefixes": ", ".join(map(str, plan.prefixes)),
        "repeats": f"{plan.repeats}, a third of it above {prefix_reuse.LONG_TOKENS} tokens",
        "file_system": file_system or "unknown",
        "page_cache": page_cache,
        **plan.settings,
    }
    if file_system in _IN_MEMORY:
        report.notes.append(
            f"The blocks were on {file_system}, which is memory: no SSD was measured. "
            "Name a folder on an SSD with --directory."
        )
