"""Steps of an executor whose kernels write rows in place."""

from collections.abc import Callable
from typing import Any

import pytest
from mlx import nn

from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.model.fast_path.opening import FastPathSettings
from shared.messages import RolledBack
from tests.mlx.executor_driver import ExecutorDriver, admission, make_executor, make_prompt
from tests.mlx.executor_driver import prefill_chunk as chunk
from tests.mlx.models import make_qwen3

PROMPTS = {1: make_prompt(1, 9), 2: make_prompt(2, 5), 3: make_prompt(3, 21)}


def _driver(model: nn.Module, kv_bits: int = 0, **settings: Any) -> ExecutorDriver:
    driver = ExecutorDriver(model, row_count=3, row_tokens=48)
    driver.executor = make_executor(
        model,
        kv_bits=kv_bits,
        profile=ExecutionProfile(has_queue=True),
        fast_path=FastPathSettings(**settings),
    )
    return driver


def _run(driver: ExecutorDriver) -> dict[int, list[int]]:
    """Join, leave, move, verify drafts and grow rows, with steps launched ahead."""
    driver.start(1, 0, PROMPTS[1])
    driver.start(2, 1, PROMPTS[2])
    first = driver.launch(decodes=[1, 2])
    second = driver.launch(decodes=[1, 2])
    driver.finish(first)
    driver.finish(second)
    driver.step(
        admitted=[admission(3, 2, PROMPTS[3])],
        prefill_chunks=[chunk(3, 0, 21, 21)],
        decodes=[1, 2],
    )
    driver.step(decodes=[1, 2, 3])
    driver.step(decodes=[1, 2, 3], drafts=[[5], [], [7, 8]])
    # A row holds all tokens but the last.
    length = len(PROMPTS[3]) + len(driver.tokens[3]) - 1
    driver.step(dropped=[1], rolled_back=[RolledBack(sequence_id=3, length=length)])
    driver.step(moves=[(3, 0)], decodes=[3, 2])
    driver.row_tokens = 64
    driver.step(decodes=[3, 2])
    return driver.tokens


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("kv_bits", [0, 8])
def test_rows_written_in_place_give_tokens_of_rows_written_by_mlx(kv_bits: int) -> None:
    """All other uses of rows in plans find the numbers that kernels have written."""
    expected = _run(_driver(make_qwen3(head_dim=32), kv_bits))
    driver = _driver(make_qwen3(head_dim=32), kv_bits, device="metal")
    assert driver.executor.layers_state == "fast path with kernels"
    assert driver.executor.store.writes_in_place
    assert _run(driver) == expected


@pytest.mark.usefixtures("kernels_on_cpu")
def test_plan_that_uses_rows_otherwise_waits_for_decodes_in_place() -> None:
    """MLX does not order other work behind writes that it does not know of."""
    driver = _driver(make_qwen3(head_dim=16), device="metal")
    driver.step()
    waits: Callable[[Any], bool] = driver.executor.waits_for_earlier_steps
    assert not waits(driver.plan(decodes=[1, 2]))
    assert not waits(driver.plan(decodes=[1], dropped=[2]))
    assert waits(driver.plan(prefill_chunks=[chunk(1, 0, 9, 9)]))
    assert waits(driver.plan(decodes=[1], drafts=[[5]]))
    assert waits(driver.plan(decodes=[1], draft_counts=[1]))
    assert waits(driver.plan(decodes=[1], moves=[(1, 0)]))
    assert waits(driver.plan(admitted=[admission(3, 2, PROMPTS[3])]))
    assert waits(driver.plan(decodes=[1], row_tokens=96))
