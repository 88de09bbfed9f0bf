"""What spilling costs decoding: two stacks side by side, one keeps its blocks on SSD too."""

import contextlib
from pathlib import Path

from services.bench import calm, disk
from services.bench.cache_setup import COMPLETIONS, Setup, body
from services.bench.overhead import progress
from services.bench.report import PART, Case, Report
from services.bench.stack import Stack
from shared.errors import UnavailableError

NAME = "decode"
COLUMNS = ["decode_tokens_per_s", "tokens_per_s", "itl_p95_ms", "spilled_mb"]
SPILLING, RESIDENT = "spilling", "memory only"
STREAMS = 4
PROMPT_TOKENS = 512
NEW_TOKENS = 256
REPEATS_FACTOR = 2
"""Repeats are short here, and what is looked for is small."""


def measure(setup: Setup, report: Report) -> None:
    """Add a case to the report.

    Raises:
        UnavailableError: a stack does not start or answer.
    """
    case = Case(conditions={PART: NAME, "tokens": NEW_TOKENS})
    blocks = setup.folder / NAME
    setup.peer.child.pause()
    with contextlib.ExitStack() as cleanup:
        stacks = {}
        for name, ssd in ((SPILLING, "true"), (RESIDENT, "false")):
            (blocks / ssd).mkdir(parents=True)
            stack = setup.start(f"{NAME}-{ssd}", blocks / ssd, ssd=ssd)
            stacks[name] = cleanup.enter_context(stack)
        for repeat in range(-1, REPEATS_FACTOR * setup.plan.repeats):
            progress(f"decoding with and without spilling, repeat {repeat + 1}")
            order = list(stacks) if repeat % 2 else list(reversed(stacks))

            def pair(order: list[str] = order) -> dict[str, dict[str, float]]:
                return {name: _decode(setup, stacks[name], blocks) for name in order}

            if repeat < 0:
                pair()
                continue
            found, foreign = calm.measured(pair, setup.plan.tries)
            for name, metrics in found.items():
                case.of(name).add(metrics | {calm.METRIC: foreign})
    case.compare("decode_tokens_per_s", SPILLING, RESIDENT)
    case.compare("tokens_per_s", SPILLING, RESIDENT)
    report.cases.append(case)
    report.notes += spilled_nothing(case)


def spilled_nothing(case: Case) -> list[str]:
    """Return a note when one contender did what only the other was to do."""
    notes = []
    if not all(case.of(SPILLING).metrics.get("spilled_mb", [0.0])):
        notes.append("Nothing was written while decoding: the two do not differ.")
    if any(case.of(RESIDENT).metrics.get("spilled_mb", [])):
        notes.append("Blocks were written although cache.ssd is false.")
    return notes


def _decode(setup: Setup, stack: Stack, blocks: Path) -> dict[str, float]:
    before = disk.folder_bytes(blocks)
    bodies = [
        body(stack.name, NEW_TOKENS, prompt=setup.prompts.text_prompt(PROMPT_TOKENS))
        for _ in range(STREAMS)
    ]
    answer = setup.ask(stack.port, COMPLETIONS, bodies)
    metrics = answer["metrics"]
    if metrics["tokens"] != STREAMS * NEW_TOKENS:
        raise UnavailableError(
            f"{metrics['tokens']:.0f} tokens came instead of {STREAMS * NEW_TOKENS}: the model "
            "ends its completions early. Use --preset: those models never end."
        )
    after = disk.wait_until_still(blocks)
    kept = ("decode_tokens_per_s", "tokens_per_s", "itl_p50_ms", "itl_p95_ms")
    return {name: metrics[name] for name in kept} | {"spilled_mb": (after - before) / 1e6}
