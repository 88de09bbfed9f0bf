"""The flags of `lockstep bench overhead`, which `lockstep bench peers` has too."""

import argparse

from services.commands.bench.flags import BenchmarkOptions, positive_int, positive_ints
from services.commands.bench.serving.overhead import OverheadPlan

SUMMARY = "the whole stack over HTTP against mlx_lm's BatchGenerator"
USUAL = {"clients": [1, 4, 8, 16], "prompt_tokens": [64, 1_024]}
QUICK = {"clients": [1, 16], "prompt_tokens": [64]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the benchmark its own flags."""
    parser.add_argument("--clients", type=positive_ints, help="comma-separated (default 1,4,8,16)")
    parser.add_argument(
        "--prompt-tokens", type=positive_ints, help="comma-separated (default 64,1024)"
    )
    parser.add_argument("--new-tokens", type=positive_int, default=64, help="completion length")
    parser.add_argument(
        "--rounds", type=positive_int, default=3, help="requests per client and repeat"
    )
    parser.add_argument("--ranks", type=positive_int, default=1)
    parser.add_argument(
        "--ceiling-ranks",
        type=positive_int,
        help="ranks of BatchGenerator (default as many as --ranks)",
    )


def make_plan(asked: BenchmarkOptions) -> OverheadPlan:
    """Return what the command line asks for.

    Raises:
        UsageError: a setting cannot be understood, or there is no such model.
        UnavailableError: a model could not be made.
    """
    arguments = asked.arguments
    return OverheadPlan(
        model=asked.model,
        ranks=arguments.ranks,
        concurrencies=arguments.clients,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        repeats=arguments.repeats,
        rounds=arguments.rounds,
        log_folder=asked.logs,
        tries=arguments.tries,
        settings=asked.settings,
        ceiling_ranks=arguments.ceiling_ranks or arguments.ranks,
    )
