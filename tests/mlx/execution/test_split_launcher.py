"""Forwards that are started in two parts on a device with a queue."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from services.rank_worker.batch.step_outputs import LaunchedStep
from services.rank_worker.device.execution_profile import ExecutionProfile
from shared.messages import AdmittedSequence, KeptBlock
from tests.mlx.executor_driver import (
    ExecutorDriver,
    admission,
    generate_with_mlx_lm,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.models import MakeModel, make_llama

LAYERS = 6
PROMPTS = {one: make_prompt(one, 5 + 13 * one) for one in (1, 2, 3, 4)}


class _QueueDriver(ExecutorDriver):
    """Driver whose executor runs on a device with a queue."""

    def launch_behind(self, before: LaunchedStep, done: list[str], **fields: Any) -> LaunchedStep:
        """Launch the next plan, which finishes the step before; append "settle" to `done` then."""

        def settle() -> None:
            waited = len(done)
            self.finish(before)
            done[waited:] = ["settle"]

        return self.executor.launch(self.plan(**fields), settle)


def _driver(
    model: nn.Module, row_count: int = 4, row_tokens: int = 96, **changes: Any
) -> _QueueDriver:
    driver = _QueueDriver(model, row_count, row_tokens)
    driver.executor = make_executor(model, profile=ExecutionProfile(has_queue=True), **changes)
    return driver


def _joining_plan(one: int, parts: int, **fields: Any) -> dict[str, Any]:
    """Return a plan in which a sequence joins and its prompt is prefilled in `parts` chunks."""
    prompt = PROMPTS[one]
    cuts = [len(prompt) * part // parts for part in range(parts + 1)]
    return {
        "admitted": [admission(one, one - 1, prompt)],
        "prefill_chunks": [
            prefill_chunk(one, start, stop, len(prompt)) for start, stop in itertools.pairwise(cuts)
        ],
        **fields,
    }


def _plans() -> Iterator[dict[str, Any]]:
    """Yield plans with prompts in one or several chunks, alone and beside decodes, and a move."""
    yield _joining_plan(1, 1)
    yield from [{"decodes": [1]}] * 2
    yield _joining_plan(2, 3, decodes=[1])
    yield from [{"decodes": [1, 2]}] * 2
    yield _joining_plan(3, 1)
    yield _joining_plan(4, 2)
    yield from [{"decodes": [1, 2, 3, 4]}] * 3
    yield {"dropped": [1], "moves": [(4, 0)], "decodes": [4, 2, 3]}
    yield from [{"decodes": [4, 2, 3]}] * 3


def _run_ahead(driver: ExecutorDriver, plans: Iterator[dict[str, Any]]) -> list[int]:
    """Launch each plan while the step before is computed.

    Returns:
        For each plan, how often it finished the step before.
    """
    settled: list[int] = []
    flight: list[LaunchedStep] = []

    def settle() -> None:
        settled[-1] += 1
        driver.finish(flight.pop(0))

    for fields in plans:
        settled.append(0)
        flight.append(driver.executor.launch(driver.plan(**fields), settle if flight else None))
        while len(flight) > 1:
            driver.finish(flight.pop(0))
    driver.finish(flight.pop())
    return settled


def test_steps_launched_in_two_halves_give_tokens_and_receipts_of_unsplit_steps(
    six_layer_model: nn.Module,
) -> None:
    """Steps launched in two halves give the tokens and receipts of unsplit steps; each finishes the
    step before once.
    """
    whole, parts = ExecutorDriver(six_layer_model), _driver(six_layer_model)
    for fields in _plans():
        whole.step(**fields)

    assert _run_ahead(parts, _plans()) == [0] + [1] * (len(list(_plans())) - 1)
    assert parts.tokens == whole.tokens
    assert parts.digests == whole.digests
    for one in (2, 3):
        count = len(parts.tokens[one])
        assert parts.tokens[one] == generate_with_mlx_lm(six_layer_model, PROMPTS[one], count)[0]


class RecordedCalls:
    """Starts and waits for arrays, in order; equal labels mean the same arrays."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._seen: list[Any] = []

    def note(self, call: str, arrays: Sequence[Any]) -> None:
        """Record a call; calls without arrays are ignored."""
        leaves: Any = tree_flatten(arrays)
        if not leaves:
            return
        first = leaves[0][1]
        # Arrays are stored, so that no other array gets the same identity.
        place = next((at for at, one in enumerate(self._seen) if one is first), None)
        if place is None:
            place = len(self._seen)
            self._seen.append(first)
        self.done.append(f"{call} {place}")

    def restart(self) -> None:
        """Forget all calls and labels."""
        self.done.clear()
        self._seen.clear()

    def clear(self) -> None:
        """Forget all calls; arrays keep their labels."""
        self.done.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> RecordedCalls:
    """Return a record of all starts and waits from now on."""
    made = RecordedCalls()
    real: tuple[Any, Any] = mx.async_eval, mx.eval

    def start(*arrays: Any) -> None:
        made.note("start", arrays)
        real[0](*arrays)

    def wait(*arrays: Any) -> None:
        made.note("wait", arrays)
        real[1](*arrays)

    monkeypatch.setattr(mx, "async_eval", start)
    monkeypatch.setattr(mx, "eval", wait)
    return made


def test_half_of_step_starts_after_same_half_of_previous_step_is_computed(
    six_layer_model: nn.Module, calls: RecordedCalls
) -> None:
    """Each half of a forward starts after the same half of the forward before is computed.

    This holds for chunks of a prompt, one decode row and uneven rows.
    """
    driver = _driver(six_layer_model)
    calls.restart()
    launched = driver.launch(**_joining_plan(1, 3))
    first, last = (0, 2, 4), (1, 3, 5)
    assert calls.done == [
        f"start {first[0]}",
        f"start {last[0]}",
        *[f"wait {first[0]}", f"start {first[1]}", f"wait {last[0]}", f"start {last[1]}"],
        *[f"wait {first[1]}", f"start {first[2]}", f"wait {last[1]}", f"start {last[2]}"],
        "start 6",
    ]
    half, number = first[2], 6
    for fields in (
        {"decodes": [1]},
        {"decodes": [1]},
        _joining_plan(2, 1),
        *[{"decodes": [1, 2]}] * 2,
    ):
        calls.clear()
        after = driver.launch_behind(launched, calls.done, **fields)
        expected = [f"wait {half}", f"start {number + 1}", "settle", f"start {number + 2}"]
        assert calls.done[:4] == expected, fields
        assert calls.done[4:] in ([], [f"start {number + 3}"]), "the draw of a prompt"
        half, number = number + 1, number + len(calls.done[4:]) + 2
        launched = after
    driver.finish(launched)


@pytest.mark.parametrize("behind", ["decodes", "prompt"])
def test_step_with_drafts_after_split_step_copies_no_rows(
    six_layer_model: nn.Module, behind: str
) -> None:
    """A step with drafts behind a split step writes the rows in place."""
    driver = _driver(six_layer_model, row_count=8, row_tokens=4_096)
    keys_bytes = driver.executor.store.bytes_per_token * 8 * 4_096 // LAYERS // 2
    ids = list(range(1, 8))
    before = driver.decode_uneven_rows(ids)

    drafts: dict[str, Any] = {"decodes": ids, "drafts": [[3]] * 7}
    if behind == "decodes":
        driver.finish(driver.launch(decodes=ids))
    else:
        prompt = make_prompt(8, 20)
        drafts["admitted"] = [admission(8, 7, prompt)]
        drafts["prefill_chunks"] = [prefill_chunk(8, 0, 10, 20), prefill_chunk(8, 10, 20, 20)]
    driver.finish(driver.launch(**drafts))
    assert mx.get_peak_memory() - before < keys_bytes // 2


def test_step_with_drafts_or_kept_blocks_is_launched_unsplit(six_layer_model: nn.Module) -> None:
    """Steps with drafts or kept blocks are not split and do not finish the step before."""
    driver = _driver(six_layer_model)
    driver.step(**_joining_plan(1, 1))
    before = driver.launch(decodes=[1])
    drafts = driver.executor.launch(driver.plan(decodes=[1], drafts=[[3]]), _never)
    driver.finish(before)
    driver.finish(drafts)
    kept = KeptBlock(sequence_id=1, start=0, length=8, hash=bytes(32))
    plan = driver.plan(keep_blocks=[kept])
    assert driver.executor.waits_for_earlier_steps(plan)
    driver.finish(driver.executor.launch(plan, None))
    assert len(driver.tokens[1]) >= 3


def _never() -> None:
    raise AssertionError("the step before must not be finished")


def test_resizing_or_filling_rows_during_split_step_changes_no_tokens(
    six_layer_model: nn.Module,
) -> None:
    """Rows that are resized or filled from blocks while a step is computed give the same tokens."""
    prompt = make_prompt(9, 40)
    kept = [
        KeptBlock(sequence_id=1, start=8 * number, length=8, hash=bytes([number]) * 32)
        for number in range(4)
    ]
    again = AdmittedSequence(
        sequence_id=2,
        slot=1,
        tokens=prompt,
        prompt_tokens=40,
        sampling=admission(1, 0, prompt).sampling,
        reused_tokens=32,
        reused_blocks=[one.hash for one in kept],
    )
    plans: list[dict[str, Any]] = [
        {"admitted": [admission(1, 0, prompt)], "prefill_chunks": [prefill_chunk(1, 0, 40, 40)]},
        {"decodes": [1]},
        {"decodes": [1], "keep_blocks": kept},
        {"decodes": [1]},
        {"row_count": 5, "row_tokens": 128, "decodes": [1]},
        {
            "row_count": 5,
            "row_tokens": 128,
            "admitted": [again],
            "prefill_chunks": [prefill_chunk(2, 32, 40, 40)],
            "decodes": [1],
        },
        *[{"row_count": 5, "row_tokens": 128, "decodes": [1, 2]}] * 4,
    ]
    whole, parts = ExecutorDriver(six_layer_model), _driver(six_layer_model)
    for fields in plans:
        whole.step(**fields)

    before: LaunchedStep | None = None
    done: list[str] = []
    for fields in plans:
        waits = before is not None and bool(fields.get("keep_blocks"))
        if before is not None and waits:
            parts.finish(before)
            before = None
        if before is None:
            before = parts.launch(**fields)
        else:
            before = parts.launch_behind(before, done, **fields)
    assert before is not None
    parts.finish(before)
    assert done == ["settle"] * (len(plans) - 2)
    assert parts.tokens == whole.tokens
    assert parts.digests == whole.digests
    assert parts.tokens[2] == parts.tokens[1][:5]


def test_steps_of_model_with_three_layers_are_not_split() -> None:
    """Forwards of a model with three layers are started whole; the second prefill of a step
    first finishes the step before."""
    driver = _driver(make_llama(3))
    prompts = [len(one.get("prefill_chunks", [])) for one in _plans()]
    assert _run_ahead(driver, _plans()) == [int(count > 1) for count in prompts]


def test_steps_of_sliding_window_model_are_not_split(make_model: MakeModel) -> None:
    """Steps of a model with sliding windows are launched whole."""
    model = make_model("gemma3")
    driver = _driver(model)
    plans = [_joining_plan(1, 2), *[{"decodes": [1]}] * 4]
    assert _run_ahead(driver, iter(plans)) == [0] * 5
    assert driver.tokens[1] == generate_with_mlx_lm(model, PROMPTS[1], 5)[0]
