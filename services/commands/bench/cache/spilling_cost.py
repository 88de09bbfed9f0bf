"""Cost of spilling during decode: two stacks, of which one also stores its blocks on SSD.

Two processes with the same work differ by several percent for their whole life, because their
memory is laid out by chance. So every repeat starts both stacks anew, in alternating order.
"""

import functools
import statistics
from pathlib import Path

from services.commands.bench.cache.testbed import CacheTestbed
from services.commands.bench.measuring import disk
from services.commands.bench.measuring.noise import add_repeat
from services.commands.bench.measuring.processes import print_progress
from services.commands.bench.measuring.report import PART, Case, Report
from services.commands.bench.measuring.stack import Stack
from shared.errors import UnavailableError

NAME = "decode"
COLUMNS = ["decode_tokens_per_s", "tokens_per_s", "itl_p95_ms", "cpu_us_per_token", "spilled_mb"]
SPILLING, RESIDENT = "spilling", "memory only"
SSD = {SPILLING: "true", RESIDENT: "false"}
"""Contender -> value of the setting cache.ssd."""
STREAMS = 4
PROMPT_TOKENS = 512
NEW_TOKENS = 256
ROUNDS = 3
"""Measurements per start of the two stacks; their means count."""


def measure(testbed: CacheTestbed, report: Report) -> None:
    """Measure decoding with and without blocks being written to SSD.

    Args:
        testbed: plan and running processes of the benchmark.
        report: gets one case with both contenders and their ratios, and notes on void comparisons.

    Raises:
        UnavailableError: when a stack does not start or answer.
    """
    case = Case(conditions={PART: NAME, "tokens": NEW_TOKENS})
    report.cases.append(case)
    for repeat in range(testbed.plan.repeats):
        print_progress(f"decoding with and without spilling, repeat {repeat + 1}")
        blocks = testbed.folder / f"{NAME}-{repeat}"
        order = list(SSD.items())[:: 1 if repeat % 2 else -1]
        with testbed.contenders(NAME, blocks, "ssd", dict(order)) as stacks:
            run = functools.partial(_run_rounds, testbed, stacks, blocks)
            # Warm-up.
            run(rounds=1)
            add_repeat(case, testbed.plan.tries, run)
    case.add_ratios(SPILLING, RESIDENT, "decode_tokens_per_s", "tokens_per_s", "cpu_us_per_token")
    report.notes += spilling_notes(case)


def _run_rounds(
    testbed: CacheTestbed, stacks: dict[str, Stack], blocks: Path, rounds: int = ROUNDS
) -> dict[str, dict[str, float]]:
    """Return the means of each contender's metrics over the rounds, which alternate."""
    found = [
        {name: _decode(testbed, stack, blocks) for name, stack in stacks.items()}
        for _ in range(rounds)
    ]
    return {
        name: {key: statistics.mean(one[name][key] for one in found) for key in found[0][name]}
        for name in SSD
    }


def spilling_notes(case: Case) -> list[str]:
    """Return a note if the stack with SSD wrote no blocks, and one if the other wrote any.

    Args:
        case: the repeats of both contenders.
    """
    notes = []
    if not all(case.values(SPILLING, "spilled_mb") or [0.0]):
        notes.append("Nothing was written while decoding: the two do not differ.")
    if any(case.values(RESIDENT, "spilled_mb")):
        notes.append("Blocks were written although cache.ssd is false.")
    return notes


def _decode(testbed: CacheTestbed, stack: Stack, blocks: Path) -> dict[str, float]:
    before, cpu_before_s = disk.folder_bytes(blocks), sum(stack.cpu_seconds().values())
    work = [[testbed.prompts.text_prompt(PROMPT_TOKENS)] for _ in range(STREAMS)]
    metrics = testbed.client.complete(stack, work, NEW_TOKENS)["metrics"]
    if metrics["tokens"] != STREAMS * NEW_TOKENS:
        raise UnavailableError(
            f"{metrics['tokens']:.0f} tokens arrived instead of {STREAMS * NEW_TOKENS}: the model "
            "ends its completions early. Use --preset: models of presets never end early."
        )
    after = disk.wait_until_unchanged(blocks)
    metrics["spilled_mb"] = (after - before) / 1e6
    cpu_s = sum(stack.cpu_seconds().values()) - cpu_before_s
    metrics["cpu_us_per_token"] = cpu_s * 1e6 / metrics["tokens"]
    found: dict[str, float] = {name: metrics[name] for name in (*COLUMNS, "itl_p50_ms")}
    return found
