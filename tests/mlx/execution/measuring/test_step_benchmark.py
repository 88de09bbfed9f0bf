"""`lockstep bench step`: numbers of operations in a decode, and figures that agree."""

import json
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.commands.bench.fake_ranks.row_filler import RowFiller
from services.commands.bench.fake_ranks.step_timer import StepTimer, rows_growth
from services.commands.bench.measuring.processes import LOCKSTEP_COMMAND
from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.profiling.part_timer import count_primitives
from shared.clock import SystemClock
from shared.configuration.settings import SchedulerConfig
from shared.errors import UsageError
from tests.mlx.executor_driver import make_executor
from tests.mlx.models import MakeModel, make_llama, make_qwen3

STEPS = 3
CONTEXT = 300
"""More tokens than the filler's block has."""
LLAMA_NODES = {1: 60, 4: 65}
QWEN3_NODES = {1: 77, 4: 83}
"""Operations that one more layer adds to a decode, by number of rows, as counted when this test was
written. Fewer are better: then lower the bound. A GPU has fewer, because there norms, rotary
embeddings and attention are one operation each."""
DEMO_NODES = {1: 442, 4: 477}
"""Operations of a decode of the demo model, which has 5 layers."""


def _timer(model: Any, *, has_queue: bool = False, kv_bytes: int = 2**30) -> StepTimer:
    executor = make_executor(model, profile=ExecutionProfile(has_queue=has_queue))
    rows = RowFiller(executor, SchedulerConfig(), 4_096, lambda: kv_bytes)
    return StepTimer(executor, rows, len(model.layers), has_queue, SystemClock())


def test_primitives_are_counted_before_evaluation_and_evaluate_nothing() -> None:
    """One with two results counts once, one that several read once, and a computed one never."""
    array = mx.array([1.0, 2.0])
    halves = list(mx.split((array + array) * array, 2))
    assert [count_primitives(halves) for _ in range(2)] == [3, 3]
    fused = mx.compile(lambda one: mx.exp(one) * one + one)(halves[0])
    assert count_primitives([fused]) == 4
    mx.eval(fused)
    assert count_primitives([fused, halves[0]]) == 0


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_layer_of_a_decode_has_no_more_operations_than_today(name: str, batch: int) -> None:
    """An operation that is added to a layer is paid for in every layer of every step.

    A step of a small batch on CUDA takes as long as the host needs to build and encode it.
    """
    make, bounds = (make_llama, LLAMA_NODES) if name == "llama" else (_qwen3, QWEN3_NODES)
    few, many = (_timer(make(layers)).measure(batch, CONTEXT, STEPS)["nodes"] for layers in (3, 6))
    assert (many - few) / 3 <= bounds[batch]


def _qwen3(layers: int) -> nn.Module:
    return make_qwen3(head_dim=16, layers=layers)


@pytest.mark.parametrize("has_queue", [False, True])
def test_figures_of_a_decode_agree(has_queue: bool) -> None:
    """Parts add up to the step, and bytes are those of the weights and of the rows."""
    model = make_llama(6)
    timer = _timer(model, has_queue=has_queue)
    found = timer.measure(3, CONTEXT, STEPS)
    again = timer.measure(3, CONTEXT, STEPS)
    assert [found[key] for key in ("nodes", "kv_mib")] == [
        again[key] for key in ("nodes", "kv_mib")
    ]
    assert found["build_ms"] + found["device_ms"] == pytest.approx(found["alone_ms"])
    assert found["build_ms"] > 0.0
    assert 0.0 < found["encode_ms"] <= found["device_ms"]
    assert found["nodes_per_layer"] == found["nodes"] / 6
    store = timer.executor.store
    lengths = [store.length(slot) for slot in range(3)]
    assert len(set(lengths)) == 3
    assert max(lengths) == CONTEXT + rows_growth(STEPS)
    tokens = sum(lengths) + 3
    assert found["kv_mib"] * 2**20 == pytest.approx(tokens * store.bytes_per_token)
    assert found["step_per_limit"] == pytest.approx(found["step_ms"] / found["limit_ms"])
    moved = found["moved_mib"] * 2**20
    assert found["limit_ms"] == pytest.approx(moved / found["device_gb_per_s"] / 1e6)


def test_steps_that_verify_drafts_keep_the_rows_and_write_more() -> None:
    """Rejected drafts leave each row as long as decodes without drafts do, also a second time."""
    timer = _timer(make_llama(6))
    store = timer.executor.store
    for drafts in (4, 4, 0):
        found = timer.measure(3, CONTEXT, STEPS, drafts)
        lengths = [store.length(slot) for slot in range(3)]
        # The drafts of the last step are still there. It was counted after all of them.
        assert max(lengths) == CONTEXT + rows_growth(STEPS) + drafts
        moved = (sum(lengths) + 3 * (1 + drafts)) * store.bytes_per_token
        assert found["kv_mib"] * 2**20 == pytest.approx(moved)


def test_drafts_of_rows_that_cannot_be_shortened_are_refused_in_a_sentence(
    make_model: MakeModel,
) -> None:
    """Windows and recurrent state forget what a rejected draft has replaced."""
    timer = _timer(make_model("gemma3"))
    with pytest.raises(UsageError, match="Drafts cannot be verified"):
        timer.measure(2, 40, STEPS, drafts=2)
    assert timer.measure(2, 40, STEPS)["nodes"] > 0.0


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", "mamba2", "qwen3_next"])
def test_rows_of_every_kind_are_filled_and_decoded(make_model: MakeModel, family: str) -> None:
    """Rows with windows, latent attention or recurrent state have uneven lengths too."""
    timer = _timer(make_model(family))
    found = timer.measure(2, 40, STEPS)
    assert found["nodes"] > 0.0
    assert found["weights_mib"] > 0.0
    assert {timer.executor.store.length(slot) - rows_growth(STEPS) for slot in (0, 1)} == {24, 40}


@pytest.mark.parametrize(
    ("batch", "context", "message"),
    [(10, 20, "different lengths"), (1, 4_090, "4096 at most"), (4, 2_000, "GiB, and KV may use")],
)
def test_rows_that_cannot_be_are_refused_in_a_sentence(
    batch: int, context: int, message: str
) -> None:
    """The next measurement is not affected."""
    timer = _timer(make_llama(3), kv_bytes=2**21)
    timer.measure(2, CONTEXT, STEPS)
    with pytest.raises(UsageError, match=message):
        timer.measure(batch, context, STEPS)
    assert timer.measure(1, CONTEXT, STEPS)["step_ms"] > 0.0


@pytest.mark.proof
def test_bench_step_of_demo_model_has_no_more_operations_than_today(tmp_path: Path) -> None:
    """The command counts what the real path hands to the device, by batch and contender."""
    options = ["--model", "demo", "--quick", "--repeats", "1", "--json", "--logs", str(tmp_path)]
    compared = "rank_worker.kv_bits=8,rank_worker.fast_path=off"
    done = subprocess.run(
        [*LOCKSTEP_COMMAND, "bench", "step", *options, "--compare", compared],
        check=True,
        capture_output=True,
        timeout=300,
    )
    document = json.loads(done.stdout)
    assert [one for one in document["notes"] if "computes layers" in one] == [
        "lockstep computes layers by: fast path.",
        f"{compared} computes layers by: mlx-lm's layers.",
    ]
    cases = {case["conditions"]["batch"]: case for case in document["cases"]}
    assert cases.keys() == DEMO_NODES.keys()
    for batch, case in cases.items():
        plain, eight_bits = (
            {name: figure["median"] for name, figure in metrics.items()}
            for metrics in (case["series"]["lockstep"], case["series"][compared])
        )
        assert plain["nodes"] <= DEMO_NODES[batch]
        assert eight_bits["kv_mib"] < 0.5 * plain["kv_mib"]
        assert plain["build_ms"] + plain["encode_ms"] <= plain["alone_ms"]
        assert f"{compared}/lockstep step_ms" in case["ratios"]
