"""Waits for the device while a plan is launched: only long prefills of divided experts wait."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import pytest

from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.execution.executor import Executor
from services.rank_worker.model.sharding import local_experts
from tests.mlx.executor_driver import (
    ExecutorDriver,
    admission,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.sharding.moe_models import make_half_of_experts, make_moe_model

ROWS = 40
"""More tokens than a prefill on a CPU needs to wait."""

LAYERS = 3


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of numbers that the host waited for; it grows as steps run."""
    monkeypatch.setitem(local_experts.WAIT_FLOPS, "cpu", 0.0)
    found: list[int] = []
    real = local_experts._on_host

    def counted(number: mx.array) -> int:
        found.append(real(number))
        return found[-1]

    monkeypatch.setattr(local_experts, "_on_host", counted)
    return found


@contextmanager
def _expect_waits(waits: list[int], count: int) -> Iterator[None]:
    """Check that the block waits `count` times."""
    before = len(waits)
    yield
    assert len(waits) - before == count


def test_decodes_of_divided_experts_never_wait_for_device(waits: list[int]) -> None:
    """Decodes never wait for the device; a long prefill waits once per layer of experts."""
    driver = ExecutorDriver(make_half_of_experts("qwen3_moe"), row_count=ROWS, row_tokens=64)
    prompts = [make_prompt(one, 3 + one % 5) for one in range(ROWS)]
    for first in range(0, ROWS, 8):
        chosen = range(first, first + 8)
        driver.step(
            admitted=[admission(one + 1, one, prompts[one]) for one in chosen],
            prefill_chunks=[
                prefill_chunk(one + 1, 0, len(prompts[one]), len(prompts[one])) for one in chosen
            ],
        )
    sequence_ids = list(range(1, ROWS + 1))
    with _expect_waits(waits, 0):
        for _ in range(3):
            driver.step(decodes=sequence_ids)
        driver.step(decodes=sequence_ids, drafts=[[1, 2]] * ROWS)
    with _expect_waits(waits, LAYERS):
        prompt = make_prompt(99, 32)
        driver.step(
            dropped=[1],
            admitted=[admission(99, 0, prompt)],
            prefill_chunks=[prefill_chunk(99, 0, 32, 32)],
        )


@pytest.mark.parametrize(
    ("lengths", "prefills"),
    [((36,), 0), ((37,), 1), ((18, 18), 0), ((19, 18), 1), ((40, 20, 37), 1), ((60, 40), 1)],
)
def test_executor_predicts_from_plan_whether_prefill_waits_for_device(
    monkeypatch: pytest.MonkeyPatch, waits: list[int], lengths: tuple[int, ...], prefills: int
) -> None:
    """The executor predicts from a plan whether its prefill waits, also that of several prompts."""
    # Two experts of 3 x 48 x 32 numbers for each of 36 tokens.
    monkeypatch.setitem(local_experts.WAIT_FLOPS, "cpu", 2.0 * 3 * 48 * 32 * 2 * 36)
    driver = ExecutorDriver(make_half_of_experts("qwen3_moe"), row_tokens=64)
    plan = driver.plan(
        admitted=[
            admission(one, one, make_prompt(one, count)) for one, count in enumerate(lengths)
        ],
        prefill_chunks=[prefill_chunk(one, 0, count, count) for one, count in enumerate(lengths)],
    )
    assert driver.executor.waits_for_earlier_steps(plan) == (prefills > 0)
    with _expect_waits(waits, LAYERS * prefills):
        driver.finish(driver.executor.launch(plan))
    decodes = driver.plan(decodes=list(range(len(lengths))))
    assert not driver.executor.waits_for_earlier_steps(decodes)


def test_rank_with_all_experts_never_waits_for_device(waits: list[int]) -> None:
    """A rank with all experts runs the layers of mlx-lm, which never wait."""
    driver = ExecutorDriver(make_moe_model("qwen3_moe"), row_tokens=64)
    plan = driver.plan(
        admitted=[admission(1, 0, make_prompt(1, 60))], prefill_chunks=[prefill_chunk(1, 0, 60, 60)]
    )
    assert not driver.executor.waits_for_earlier_steps(plan)
    driver.finish(driver.executor.launch(plan))
    assert waits == []


def test_resizing_large_rows_waits_for_earlier_steps() -> None:
    """A plan that resizes large rows, layer by layer, waits for earlier steps."""
    model = make_moe_model("qwen3_moe")
    driver = ExecutorDriver(model, row_count=2, row_tokens=64)
    profile = ExecutionProfile(resize_at_once_bytes_max=100_000)
    executor: Executor = make_executor(model, profile=profile)
    driver.executor = executor
    driver.start(1, 0, make_prompt(1, 5))
    assert (
        2 * 64 * executor.store.bytes_per_token < 100_000 < 4 * 64 * executor.store.bytes_per_token
    )
    assert not executor.waits_for_earlier_steps(driver.plan(decodes=[1]))
    driver.row_count = 4
    plan = driver.plan(decodes=[1])
    assert executor.waits_for_earlier_steps(plan)
    driver.finish(executor.launch(plan))
    plan = driver.plan(decodes=[1])
    assert not executor.waits_for_earlier_steps(plan), "the rows have that shape"
