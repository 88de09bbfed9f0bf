"""Chunks of several prompts side by side in one forward: only the number of forwards changes."""

from typing import Any

import mlx.core as mx
import pytest

from services.rank_worker.device.execution_profile import ExecutionProfile
from tests.mlx.execution.fast_path.attention_models import make
from tests.mlx.executor_driver import (
    ExecutorDriver,
    admission,
    generate_with_mlx_lm,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.models import PLAIN_FAMILIES, MakeModel

_LENGTHS = {1: 70, 2: 20, 3: 33, 4: 48}
_SLOTS = {1: 2, 2: 0, 3: 3, 4: 1}


def _serve(driver: ExecutorDriver) -> dict[int, list[int]]:
    """Prefill four prompts in two plans while one decodes; return their prompts."""
    prompts = {one: make_prompt(one, length) for one, length in _LENGTHS.items()}
    driver.start(2, _SLOTS[2], prompts[2])
    others = [1, 3, 4]
    driver.step(
        admitted=[admission(one, _SLOTS[one], prompts[one]) for one in others],
        prefill_chunks=[prefill_chunk(one, 0, 17, _LENGTHS[one]) for one in others],
        decodes=[2],
    )
    stops = {1: 40, 3: 33, 4: 48}
    driver.step(
        prefill_chunks=[prefill_chunk(one, 17, stops[one], _LENGTHS[one]) for one in others],
        decodes=[2],
    )
    driver.step(prefill_chunks=[prefill_chunk(1, 40, 70, 70)], decodes=[2, 4, 3])
    for _ in range(3):
        driver.step(decodes=[2, 4, 1, 3])
    return prompts


@pytest.mark.parametrize("pads", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_chunks_side_by_side_give_tokens_of_mlx_lm(
    make_model: MakeModel, family: str, pads: bool
) -> None:
    """Chunks at different places of their prompts, of which some sample and some do not."""
    model = make_model(family)
    driver = ExecutorDriver(model)
    driver.executor = make_executor(model, profile=ExecutionProfile(pads_prefill=pads))
    prompts = _serve(driver)
    counts = {one: len(tokens) for one, tokens in driver.tokens.items()}
    assert counts == {1: 4, 2: 7, 3: 5, 4: 5}
    assert driver.tokens == {
        one: generate_with_mlx_lm(model, prompt, counts[one])[0] for one, prompt in prompts.items()
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [20, 51, 70, 30]),
        ({"profile": ExecutionProfile(pads_prefill=True)}, [32, 96, 80, 32]),
        ({"profile": ExecutionProfile(grouped_tokens_max=0)}, [20, 17, 17, 17, 23, 16, 31, 30]),
        ({"fast_path": None}, [20, 17, 17, 17, 23, 16, 31, 30]),
    ],
    ids=["joined", "padded", "apart", "mlx-lm's layers"],
)
def test_plan_has_one_forward_for_its_chunks_where_layers_take_them(
    make_model: MakeModel, changes: dict[str, Any], expected: list[int], widths: list[int]
) -> None:
    """Not where prompts must not share a forward, nor with mlx-lm's layers."""
    driver = ExecutorDriver(make_model("qwen3"))
    driver.executor = make_executor(make_model("qwen3"), **changes)
    _serve(driver)
    assert widths == expected


def test_quantized_rows_are_prefilled_one_by_one() -> None:
    """Attention reads copies of them, which would be held for all chunks of a forward."""
    executor = make_executor(make("qwen3", 4, 2, 32), kv_bits=8)
    assert not executor.store.can_concatenate


def test_chunks_side_by_side_are_written_in_place(make_model: MakeModel) -> None:
    """No array of rows is copied: a row that is read is not written any more."""
    model = make_model("qwen3")
    driver = ExecutorDriver(model, row_count=64, row_tokens=4_096)
    chunks = [prefill_chunk(one, 0, 8 + one, 8 + one) for one in range(1, 9)]
    admitted = [admission(one, one, make_prompt(one, 8 + one)) for one in range(1, 9)]
    driver.start(100, 0, make_prompt(100, 5))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    driver.step(admitted=admitted, prefill_chunks=chunks)
    layer = driver.executor.store.bytes_per_token * 64 * 4_096 // 4
    assert mx.get_peak_memory() - before < layer
