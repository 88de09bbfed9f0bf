"""First layers of a decode on a CPU, started before the previous result is read."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx import nn

from services.rank_worker.batch.step_outputs import LaunchedStep
from shared.messages import KeptBlock
from tests.mlx.executor_driver import ExecutorDriver, admission, make_prompt, prefill_chunk
from tests.mlx.models import make_llama

PROMPTS = {one: make_prompt(one, 5 + 3 * one) for one in (1, 2, 3)}


def _plans() -> Iterator[dict[str, Any]]:
    """Yield plans with uneven decodes, a join, a drop and a move."""
    for one in (1, 2):
        prompt = PROMPTS[one]
        yield {
            "admitted": [admission(one, one - 1, prompt)],
            "prefill_chunks": [prefill_chunk(one, 0, len(prompt), len(prompt))],
        }
    yield from [{"decodes": [1, 2]}] * 4
    prompt = PROMPTS[3]
    yield {
        "admitted": [admission(3, 2, prompt)],
        "prefill_chunks": [prefill_chunk(3, 0, len(prompt), len(prompt))],
        "decodes": [1, 2],
    }
    yield from [{"decodes": [1, 2, 3]}] * 4
    yield {"dropped": [1], "moves": [(3, 0)], "decodes": [3, 2]}
    yield from [{"decodes": [3, 2]}] * 4


def _run_with_early_starts(driver: ExecutorDriver, plans: Iterator[dict[str, Any]]) -> list[bool]:
    """Build each step behind the previous one, as `StepLoop` does on a CPU.

    Returns:
        For each step, whether its first layers were started early.
    """
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


def test_starting_first_layers_early_changes_no_tokens_or_receipt_digests(
    six_layer_model: nn.Module,
) -> None:
    """Starting the first layers before the previous result is read changes no tokens or receipts;
    only decodes start early.
    """
    whole, begun = ExecutorDriver(six_layer_model), ExecutorDriver(six_layer_model)
    for fields in _plans():
        whole.step(**fields)

    early = _run_with_early_starts(begun, _plans())
    assert early == [not fields.get("prefill_chunks") for fields in _plans()]
    assert begun.tokens == whole.tokens
    assert begun.digests == whole.digests


def test_starting_first_layers_early_copies_no_kv_rows(six_layer_model: nn.Module) -> None:
    """Early first layers write rows in place while the previous step is still computed."""
    driver = ExecutorDriver(six_layer_model, row_count=8, row_tokens=4_096)
    layer_bytes = driver.executor.store.bytes_per_token * 8 * 4_096 // 6
    ids = list(range(1, 9))
    before = driver.decode_uneven_rows(ids)

    early = _run_with_early_starts(driver, iter([{"decodes": ids}] * 8))
    assert all(early)
    assert mx.get_peak_memory() - before < layer_bytes // 2


def test_only_plain_decode_steps_start_first_layers_early(six_layer_model: nn.Module) -> None:
    """Steps without decodes, with drafts or with kept blocks do not start early."""
    driver = ExecutorDriver(six_layer_model)
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


def test_model_with_three_layers_starts_no_step_early() -> None:
    """With three layers no step starts early, because one layer would delay the result before
    it.
    """
    driver = ExecutorDriver(make_llama(3))
    driver.start(1, 0, PROMPTS[1])
    launched = driver.executor.prepare(driver.plan(decodes=[1]))
    assert not driver.executor.start_first_layers(launched)
    driver.executor.start(launched)
    driver.finish(launched)
    assert len(driver.tokens[1]) == 2
