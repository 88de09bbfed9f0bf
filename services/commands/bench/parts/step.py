"""`lockstep bench step`: where the time of a decode step goes, against what memory allows.

A rank without a scheduler decodes rows of uneven lengths, greedily. Contenders are the same model
under other settings, each in a process of its own, and are measured in turn.

The parts of a step are those of one that runs alone, for which the host waits before it builds the
next one; of such steps the one of median length counts:

- nodes, nodes_per_layer: operations of the step's graph, in all and divided by the number of
  layers. The embedding, the head and sampling are among them. Compiled operations count as one.
- build_ms: the host builds the graph.
- encode_ms: the host hands the graph to the device. On a CPU MLX computes meanwhile.
- device_ms: from the first work that is handed over until the device has finished. It contains
  encode_ms. Where the host is slower than the device, the device idles in it.
- alone_ms: the whole step: build_ms and device_ms.
- step_ms: the mean time between the ends of two steps while one is built ahead, as requests see it.

With --drafts a step verifies drafts of each row, and the next one rejects them. Its plan says how
many are accepted, so it is built when the one before has ended: step_ms is then a mean of alone_ms.

With several ranks the model is divided as world.sharding says, and the figures are those of rank 0:
its share of the weights, and its host. Ranks wait for each other in every step.

A step must read the weights, of routed experts those that its tokens chose, and the KV of all rows,
and write the KV of new tokens: weights_mib and kv_mib, moved_mib together. limit_ms is the
time that this takes at device_gb_per_s, the speed at which the device changes a large array, which
is measured each time. step_per_limit is step_ms divided by limit_ms.
"""

import click
import msgspec

from services.commands.bench.flags import BenchmarkOption, compare_option, numbers_option
from services.commands.bench.flags import number_option as number
from services.commands.bench.measuring.report import Report
from services.commands.bench.measuring.row_lengths import uneven_lengths
from services.commands.bench.parts.worlds import (
    LOCKSTEP,
    WorldsPlan,
    check_settings,
    measure_worlds,
    started_worlds,
)

COLUMNS = [
    "nodes",
    "nodes_per_layer",
    "build_ms",
    "encode_ms",
    "device_ms",
    "step_ms",
    "moved_mib",
    "limit_ms",
    "step_per_limit",
]
COMPARED = ("step_ms", "nodes")
"""Metrics of the other contenders that are divided by those of LOCKSTEP."""
_KV_BITS = "LOCKSTEP_RANK_WORKER_KV_BITS"


class DecodeStepPlan(WorldsPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench step`, from its command line."""

    batches: list[int]
    """Numbers of rows that decode together."""
    context: list[int]
    """Lengths of the longest row in tokens."""
    steps: int
    """Timed decode steps per repeat, alone and ahead each."""
    drafts: int
    """Drafts that each row verifies in a step."""
    kv_bits: str | None
    """Value of rank_worker.kv_bits for all contenders; None: that of the settings."""


OPTIONS: list[click.Parameter] = [
    numbers_option("--batches", "Numbers of rows that decode", "1,4,16,64", quick="1,4"),
    numbers_option("--context", "Lengths of the longest row in tokens", "1024", quick="256"),
    numbers_option("--ranks", "Numbers of ranks that share the model", "1"),
    number("--steps", "Timed steps per repeat", 32, quick=8),
    BenchmarkOption(
        "--drafts", "Drafts that each row verifies", 0, type=click.IntRange(min=0), metavar="N"
    ),
    BenchmarkOption(
        "--kv-bits", "Value of rank_worker.kv_bits", type=click.Choice(["0", "4", "8"])
    ),
    compare_option("Measure also with these settings, for example rank_worker.kv_bits=8"),
]
"""Options of this benchmark."""


def measure(plan: DecodeStepPlan, report: Report) -> None:
    """Measure decode steps of a model by batch and context, and of all contenders in turn.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per batch and context, and a note for each that does not fit.

    Raises:
        ConfigError: a setting is wrong.
        UnavailableError: a rank does not start, or nothing could be measured.
        UsageError: rows of a context cannot be uneven.
    """
    if plan.kv_bits is not None:
        plan = msgspec.structs.replace(plan, settings=plan.settings | {_KV_BITS: plan.kv_bits})
    check_settings(plan)
    for batch in plan.batches:
        for context in plan.context:
            uneven_lengths(batch, context)
    order = {"steps": plan.steps, "drafts": plan.drafts}
    with started_worlds(plan, report) as worlds:
        report.settings |= order
        for context in plan.context:
            for batch in plan.batches:
                conditions = {"batch": batch, "context": context}
                measure_worlds(plan, report, worlds, conditions, order, COMPARED)
        kind = worlds[LOCKSTEP].descriptions[0]["kind"]
    if kind == "cpu":
        report.notes.append(
            "On a CPU MLX computes while it is handed the work, so encode_ms contains most of "
            "device_ms. The limit is that of one core; matrix products use several, and caches."
        )
