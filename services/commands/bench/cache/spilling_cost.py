"""Cost of spilling during decode: two stacks, of which one also stores its blocks on SSD.

Two processes with the same work differ by several percent for their whole life, because their
memory is laid out by chance. So every repeat starts both stacks anew, in alternating order.
"""

import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path

from services.commands.bench.cache.testbed import CacheTestbed
from services.commands.bench.load.load_processes import COMPLETIONS, request_body
from services.commands.bench.measuring import disk, noise
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
    testbed.peer.child.pause()
    for repeat in range(testbed.plan.repeats):
        print_progress(f"decoding with and without spilling, repeat {repeat + 1}")
        blocks = testbed.folder / f"{NAME}-{repeat}"
        order = [SPILLING, RESIDENT][:: 1 if repeat % 2 else -1]
        with _started_stacks(testbed, blocks, order) as stacks:
            # Warm-up.
            _run_round(testbed, stacks, blocks)

            def rounds(
                stacks: dict[str, Stack] = stacks, blocks: Path = blocks
            ) -> list[dict[str, dict[str, float]]]:
                return [_run_round(testbed, stacks, blocks) for _ in range(ROUNDS)]

            found, foreign = noise.measure_with_retries(rounds, testbed.plan.tries)
        for name in SSD:
            series = [metrics[name] for metrics in found]
            means = {key: statistics.mean(one[key] for one in series) for key in series[0]}
            case.series_of(name).add(means | {noise.FOREIGN_CORES: foreign})
    for metric in ("decode_tokens_per_s", "tokens_per_s", "cpu_us_per_token"):
        case.add_ratio(metric, SPILLING, RESIDENT)
    report.cases.append(case)
    report.notes += spilling_notes(case)


@contextlib.contextmanager
def _started_stacks(
    testbed: CacheTestbed, blocks: Path, order: list[str]
) -> Iterator[dict[str, Stack]]:
    with contextlib.ExitStack() as cleanup:
        stacks = {}
        for name in order:
            folder = blocks / SSD[name]
            folder.mkdir(parents=True)
            stack = testbed.start(f"{NAME}-{SSD[name]}", folder, ssd=SSD[name])
            stacks[name] = cleanup.enter_context(stack)
        yield stacks


def _run_round(
    testbed: CacheTestbed, stacks: dict[str, Stack], blocks: Path
) -> dict[str, dict[str, float]]:
    return {name: _decode(testbed, stack, blocks) for name, stack in stacks.items()}


def spilling_notes(case: Case) -> list[str]:
    """Return a note if the stack with SSD wrote no blocks, and one if the other wrote any.

    Args:
        case: the repeats of both contenders.
    """
    notes = []
    if not all(case.series_of(SPILLING).metrics.get("spilled_mb", [0.0])):
        notes.append("Nothing was written while decoding: the two do not differ.")
    if any(case.series_of(RESIDENT).metrics.get("spilled_mb", [])):
        notes.append("Blocks were written although cache.ssd is false.")
    return notes


def _decode(testbed: CacheTestbed, stack: Stack, blocks: Path) -> dict[str, float]:
    before, cpu_before_s = disk.folder_bytes(blocks), sum(stack.cpu_seconds().values())
    bodies = [
        request_body(stack.name, NEW_TOKENS, prompt=testbed.prompts.text_prompt(PROMPT_TOKENS))
        for _ in range(STREAMS)
    ]
    answer = testbed.request(stack.port, COMPLETIONS, bodies)
    metrics = answer["metrics"]
    if metrics["tokens"] != STREAMS * NEW_TOKENS:
        raise UnavailableError(
            f"{metrics['tokens']:.0f} tokens arrived instead of {STREAMS * NEW_TOKENS}: the model "
            "ends its completions early. Use --preset: models of presets never end early."
        )
    after = disk.wait_until_unchanged(blocks)
    metrics["spilled_mb"] = (after - before) / 1e6
    cpu_s = sum(stack.cpu_seconds().values()) - cpu_before_s
    metrics["cpu_us_per_token"] = cpu_s * 1e6 / metrics["tokens"]
    return {name: metrics[name] for name in (*COLUMNS, "itl_p50_ms")}
