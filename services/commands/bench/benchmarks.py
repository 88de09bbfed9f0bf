"""Table of all benchmarks with their options, parameters and measuring functions."""

from services.commands.bench.cache import benchmark as cache
from services.commands.bench.cache.testbed import CachePlan
from services.commands.bench.flags import MODEL_OPTIONS, SETTINGS_OPTION
from services.commands.bench.measuring.report import Report
from services.commands.bench.parts import accuracy, gateway, prefill, splits, step, steps
from services.commands.bench.plans import Benchmark
from services.commands.bench.serving import (
    overhead,
    overload,
    peers,
    ranks,
    recovery,
    start,
    structured,
)
from services.commands.bench.speculation import benchmark as speculation
from services.commands.bench.speculation import text_check


def _measure_speculation(plan: speculation.SpeculationPlan, report: Report) -> None:
    if plan.check:
        text_check.measure(plan, report, plan.check)
    else:
        speculation.measure(plan, report)


_TABLE = [
    Benchmark(
        name="overhead",
        summary="the whole stack over HTTP against mlx_lm's BatchGenerator",
        repeats=5,
        options=[*MODEL_OPTIONS, *overhead.OPTIONS, SETTINGS_OPTION],
        plan=overhead.OverheadPlan,
        measure=overhead.measure,
        columns=overhead.COLUMNS,
    ),
    Benchmark(
        name="peers",
        summary="the whole stack against mlx_lm.server and, where installed, vllm-mlx",
        repeats=5,
        options=[*MODEL_OPTIONS, *overhead.OPTIONS, SETTINGS_OPTION, peers.VLLM_MLX_OPTION],
        plan=peers.PeersPlan,
        measure=peers.measure,
        columns=peers.COLUMNS,
    ),
    Benchmark(
        name="steps",
        summary="idle time between steps that the scheduler causes, with a rank that sleeps",
        repeats=5,
        options=steps.OPTIONS,
        plan=steps.StepsPlan,
        measure=steps.measure,
        columns=steps.COLUMNS,
    ),
    Benchmark(
        name="step",
        summary="a decode step by batch: operations, host and device time, bytes, and the limit of "
        "the memory",
        repeats=3,
        options=[*MODEL_OPTIONS, *step.OPTIONS, SETTINGS_OPTION],
        plan=step.DecodeStepPlan,
        measure=step.measure,
        columns=step.COLUMNS,
    ),
    Benchmark(
        name="prefill",
        summary="prompts that come at once, computed together and one by one",
        repeats=3,
        options=[*MODEL_OPTIONS, *prefill.OPTIONS, SETTINGS_OPTION],
        plan=prefill.PrefillPlan,
        measure=prefill.measure,
        columns=prefill.COLUMNS,
    ),
    Benchmark(
        name="accuracy",
        summary="errors of log probabilities against float32, and the influence of other rows on "
        "their bits",
        repeats=3,
        options=[*MODEL_OPTIONS, *accuracy.OPTIONS, SETTINGS_OPTION],
        plan=accuracy.AccuracyPlan,
        measure=accuracy.measure,
        columns=accuracy.COLUMNS,
    ),
    Benchmark(
        name="gateway",
        summary="streamed tokens per second that one gateway writes",
        repeats=5,
        options=[*MODEL_OPTIONS, *gateway.OPTIONS],
        plan=gateway.GatewayPlan,
        measure=gateway.measure,
        columns=gateway.COLUMNS,
    ),
    Benchmark(
        name="cache",
        summary="time that reused prefixes save in memory, on SSD and after a restart, and their "
        "cost",
        repeats=3,
        options=[*MODEL_OPTIONS, *cache.OPTIONS, SETTINGS_OPTION],
        plan=CachePlan,
        measure=cache.measure,
        columns=cache.COLUMNS,
        preset="long",
    ),
    Benchmark(
        name="ranks",
        summary="first tokens, tokens/s, parts of a step by rank, and memory of a world of ranks",
        repeats=3,
        options=[*MODEL_OPTIONS, *ranks.OPTIONS, SETTINGS_OPTION],
        plan=ranks.RanksPlan,
        measure=ranks.measure,
        columns=ranks.COLUMNS,
    ),
    Benchmark(
        name="overload",
        summary="goodput and time to refusal when far more requests arrive than can be served",
        repeats=3,
        options=[*MODEL_OPTIONS, *overload.OPTIONS, SETTINGS_OPTION],
        plan=overload.OverloadPlan,
        measure=overload.measure,
        columns=overload.COLUMNS,
    ),
    Benchmark(
        name="recovery",
        summary="the pause of streams when a rank is killed, and where its time goes",
        repeats=5,
        options=[*MODEL_OPTIONS, *recovery.OPTIONS, SETTINGS_OPTION],
        plan=recovery.RecoveryPlan,
        measure=recovery.measure,
        columns=recovery.COLUMNS,
    ),
    Benchmark(
        name="start",
        summary="the first prompts after a start beside later ones",
        repeats=3,
        options=[*MODEL_OPTIONS, *start.OPTIONS, SETTINGS_OPTION],
        plan=start.FirstPromptsPlan,
        measure=start.measure,
        columns=start.COLUMNS,
    ),
    Benchmark(
        name="splits",
        summary="one rank against tensor, expert and pipeline splits: time per step and where it "
        "goes",
        repeats=3,
        options=[*MODEL_OPTIONS, *splits.OPTIONS],
        plan=splits.SplitsPlan,
        measure=splits.measure,
        columns=splits.COLUMNS,
        preset="tiny-moe",
    ),
    Benchmark(
        name="speculation",
        summary="tokens/s with and without drafts, on text that repeats itself and on text that "
        "does not",
        repeats=5,
        options=[*speculation.OPTIONS, SETTINGS_OPTION],
        plan=speculation.SpeculationPlan,
        measure=_measure_speculation,
        columns=speculation.COLUMNS,
    ),
    Benchmark(
        name="structured",
        summary="time between tokens of plain requests beside requests with grammars, and masks",
        repeats=5,
        options=[*MODEL_OPTIONS, *structured.OPTIONS, SETTINGS_OPTION],
        plan=structured.StructuredPlan,
        measure=structured.measure,
        columns=structured.COLUMNS,
        preset="tiny-150k",
    ),
]
BENCHMARKS = {benchmark.name: benchmark for benchmark in _TABLE}
"""Name -> benchmark, in the order of `--help`."""
