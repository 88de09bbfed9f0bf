"""The flags of `lockstep bench cache`."""

import argparse
from pathlib import Path

from services.commands.bench.cache import benchmark
from services.commands.bench.cache.testbed import CachePlan
from services.commands.bench.flags import (
    BenchmarkOptions,
    listed_names,
    positive_int,
    positive_ints,
)
from shared.errors import UsageError

SUMMARY = "what reused prefixes save, in memory, on SSD and after a restart, and what keeping costs"
USUAL = {
    "parts": list(benchmark.PARTS),
    "prefixes": [1_024, 4_096, 16_384],
    "turns": 12,
    "tokens": 6_000,
}
QUICK = {"parts": list(benchmark.PARTS), "prefixes": [1_024], "turns": 4, "tokens": 1_500}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the benchmark its own flags."""
    parser.add_argument(
        "--parts", type=_parts, help=f"comma-separated (default {','.join(benchmark.PARTS)})"
    )
    parser.add_argument("--prefixes", type=positive_ints, help="tokens (default 1024,4096,16384)")
    parser.add_argument("--turns", type=positive_int, help="of the replayed session (default 12)")
    parser.add_argument("--tokens", type=positive_int, help="of its last request (default 6000)")
    parser.add_argument("--ranks", type=positive_int, default=1)
    parser.add_argument(
        "--directory", metavar="FOLDER", type=Path, help="where blocks are stored for the run"
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="do not empty the page cache before blocks are read: what a restore itself costs",
    )


def make_plan(asked: BenchmarkOptions) -> CachePlan:
    """Return what the command line asks for.

    Raises:
        UsageError: a setting cannot be understood, or a folder is not there.
        UnavailableError: a model could not be made.
    """
    arguments = asked.arguments
    if arguments.directory is not None and not arguments.directory.is_dir():
        raise UsageError(f"--directory {arguments.directory}: there is no such folder.")
    return CachePlan(
        model=asked.model,
        ranks=arguments.ranks,
        parts=arguments.parts,
        prefixes=arguments.prefixes,
        turns=arguments.turns,
        tokens=arguments.tokens,
        repeats=arguments.repeats,
        log_folder=asked.logs,
        directory=arguments.directory,
        tries=arguments.tries,
        is_warm=arguments.warm,
        settings=asked.settings,
    )


def _parts(text: str) -> list[str]:
    return listed_names(text, "part", benchmark.PARTS)
