"""A CPU begins the next step before the result of the last is read: nothing else changes."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.execution.executor import LaunchedStep
from shared.messages import KeptBlock
from tests.mlx.executor_driver import Driver, admit, chunk, make_prompt
from tests.mlx.models import make_llama

PROMPTS = {one: make_prompt(one, 5 + 3 * one) for one in (1, 2, 3)}


@pytest.fixture(scope="module")
def deep() -> nn.Module:
    """A model of which one layer is a small part."""
    return make_llama(6)


def _plans() -> Iterator[dict[str, Any]]:
    """Yield uneven rows that decode, one that joins, one that leaves and what closes up."""
    for one in (1, 2):
        prompt = PROMPTS[one]
        yield {
            "admitted": [admit(one, one - 1, prompt)],
            "prefill_chunks": [chunk(one, 0, len(prompt), len(prompt))],
        }
    yield from [{"decodes": [1, 2]}] * 4
    prompt = PROMPTS[3]
    yield {
        "admitted": [admit(3, 2, prompt)],
        "prefill_chunks": [chunk(3, 0, len(prompt), len(prompt))],
        "decodes": [1, 2],
    }
    yield from [{"decodes": [1, 2, 3]}] * 4
    yield {"dropped": [1], "moves": [(3, 0)], "decodes": [3, 2]}
    yield from [{"decodes": [3, 2]}] * 4


def _run_begun(driver: Driver, plans: Iterator[dict[str, Any]]) -> list[bool]:
    """Build each step behind the one before, as `Steps` does on a CPU; tell which were begun."""
    begun: list[bool] = []
    before: LaunchedStep | None = None
    for fields in plans:
        if fields.get("prefill_chunks") and before is not None:
            driver.finish(before)
            before = None
        launched = driver.executor.prepare(driver.plan(**fields))
        begun.append(driver.executor.start_first_layers(launched))
        if before is not None:
            driver.finish(before)
        driver.executor.start(launched)
        before = launched
    assert before is not None
    driver.finish(before)
    return begun


def test_steps_that_are_begun_early_give_the_same(deep: nn.Module) -> None:
    """Tokens and receipts are those of steps that are started whole; decodes alone are begun."""
    whole, begun = Driver(deep), Driver(deep)
    for fields in _plans():
        whole.step(**fields)

    early = _run_begun(begun, _plans())
    assert early == [not fields.get("prefill_chunks") for fields in _plans()]
    assert begun.tokens == whole.tokens
    assert begun.digests == whole.digests


def test_a_step_that_is_begun_copies_no_rows(deep: nn.Module) -> None:
    """The step before may still be computed, but has read the rows that the first layers write."""
    driver = Driver(deep, row_count=8, row_tokens=4_096)
    layer_bytes = driver.executor.kv_bytes_per_token * 8 * 4_096 // 6
    ids = list(range(1, 9))
    before = driver.fill_rows(ids)

    early = _run_begun(driver, iter([{"decodes": ids}] * 8))
    assert all(early)
    assert mx.get_peak_memory() - before < layer_bytes // 2


def test_what_is_no_single_forward_of_decodes_is_not_begun(deep: nn.Module) -> None:
    """Drafts are verified by forwards that wait for each other, and kept blocks are read first."""
    driver = Driver(deep)
    driver.start(1, 0, PROMPTS[1])
    first = driver.step(decodes=[1])
    kept = KeptBlock(sequence_id=1, start=0, length=8, hash=bytes(32))
    others: list[dict[str, Any]] = [
        {},
        {"decodes": [1], "keep_blocks": [kept]},
        {"decodes": [1], "drafts": [[3, 4]]},
    ]
    for fields in others:
        launched = driver.executor.prepare(driver.plan(**fields))
        assert not driver.executor.start_first_layers(launched), fields
        driver.executor.start(launched)
        driver.finish(launched)
    assert len(first.tokens) == 1


def test_a_model_of_few_layers_is_not_begun() -> None:
    """One layer of three is no small part: the result before it would be held back."""
    driver = Driver(make_llama(3))
    driver.start(1, 0, PROMPTS[1])
    launched = driver.executor.prepare(driver.plan(decodes=[1]))
    assert not driver.executor.start_first_layers(launched)
    driver.executor.start(launched)
    driver.finish(launched)
    assert len(driver.tokens[1]) == 2
