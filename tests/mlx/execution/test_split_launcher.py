"""On a device with a queue forwards are started in two parts: nothing else changes."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.execution.executor import LaunchedStep
from shared.messages import AdmittedSequence, KeptBlock
from tests.mlx.executor_driver import Driver, admit, chunk, executor_of, make_prompt, reference
from tests.mlx.models import make_llama

Make = Callable[[str], nn.Module]

LAYERS = 6
PROMPTS = {one: make_prompt(one, 5 + 13 * one) for one in (1, 2, 3, 4)}


@pytest.fixture(scope="module")
def deep() -> nn.Module:
    """A model of which one layer is a small part."""
    return make_llama(LAYERS)


class _Driver(Driver):
    """Launches as on a device with a queue."""

    def launch_behind(self, before: LaunchedStep, done: list[str], **fields: Any) -> LaunchedStep:
        """Launch the next plan, which finishes the one before and says so in `done`."""

        def settle() -> None:
            waited = len(done)
            self.finish(before)
            done[waited:] = ["settle"]

        return self.executor.launch(self.plan(**fields), settle)


def _driver(model: nn.Module, row_count: int = 4, row_tokens: int = 96, **changes: Any) -> _Driver:
    driver = _Driver(model, row_count, row_tokens)
    driver.executor = executor_of(model, profile=ExecutionProfile(has_queue=True), **changes)
    return driver


def _joins(one: int, parts: int, **fields: Any) -> dict[str, Any]:
    """Return a plan in which a sequence joins, whose prompt is read by so many forwards."""
    prompt = PROMPTS[one]
    cuts = [len(prompt) * part // parts for part in range(parts + 1)]
    return {
        "admitted": [admit(one, one - 1, prompt)],
        "prefill_chunks": [
            chunk(one, start, stop, len(prompt)) for start, stop in itertools.pairwise(cuts)
        ],
        **fields,
    }


def _plans() -> Iterator[dict[str, Any]]:
    """Yield prompts in one forward and in several, alone and beside decodes; and a move."""
    yield _joins(1, 1)
    yield from [{"decodes": [1]}] * 2
    yield _joins(2, 3, decodes=[1])
    yield from [{"decodes": [1, 2]}] * 2
    yield _joins(3, 1)
    yield _joins(4, 2)
    yield from [{"decodes": [1, 2, 3, 4]}] * 3
    yield {"dropped": [1], "moves": [(4, 0)], "decodes": [4, 2, 3]}
    yield from [{"decodes": [4, 2, 3]}] * 3


def _run_ahead(driver: Driver, plans: Iterator[dict[str, Any]]) -> list[int]:
    """Launch each plan while the one before is computed; tell how often that was finished."""
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


def test_steps_in_two_parts_give_the_same(deep: nn.Module) -> None:
    """Tokens and receipts are those of steps that are launched and finished one by one, and each
    step finishes the one before exactly once.
    """
    whole, parts = Driver(deep), _driver(deep)
    for fields in _plans():
        whole.step(**fields)

    assert _run_ahead(parts, _plans()) == [0] + [1] * (len(list(_plans())) - 1)
    assert parts.tokens == whole.tokens
    assert parts.digests == whole.digests
    for one in (2, 3):
        count = len(parts.tokens[one])
        assert parts.tokens[one] == reference(deep, PROMPTS[one], count)[0]


class Calls:
    """What is started and waited for, in order; equal labels are the same arrays."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._seen: list[Any] = []

    def note(self, call: str, arrays: Sequence[Any]) -> None:
        """Take note of a call with arrays, if it has any."""
        leaves: Any = tree_flatten(arrays)
        if not leaves:
            return
        first = leaves[0][1]
        # Held, so that no other array gets its identity.
        place = next((at for at, one in enumerate(self._seen) if one is first), None)
        if place is None:
            place = len(self._seen)
            self._seen.append(first)
        self.done.append(f"{call} {place}")

    def clear(self) -> None:
        """Forget all calls; arrays keep their labels."""
        self.done.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Return what is started and waited for from now on."""
    made = Calls()
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


def test_no_layer_is_written_while_it_may_still_be_read(deep: nn.Module, calls: Calls) -> None:
    """The first half of each forward is started when that half of the one before is computed, and
    the rest when all of it is; what is waited for was started by the forward before, however the
    rows are written: chunks of a prompt, one row that decodes, uneven rows.
    """
    driver = _driver(deep)
    launched = driver.launch(**_joins(1, 3))
    first, last = (0, 2, 4), (1, 3, 5)
    assert calls.done == [
        f"start {first[0]}",
        f"start {last[0]}",
        *[f"wait {first[0]}", f"start {first[1]}", f"wait {last[0]}", f"start {last[1]}"],
        *[f"wait {first[1]}", f"start {first[2]}", f"wait {last[1]}", f"start {last[2]}"],
        "start 6",
    ]
    half, number = first[2], 6
    for fields in ({"decodes": [1]}, {"decodes": [1]}, _joins(2, 1), *[{"decodes": [1, 2]}] * 2):
        calls.clear()
        after = driver.launch_behind(launched, calls.done, **fields)
        expected = [f"wait {half}", f"start {number + 1}", "settle", f"start {number + 2}"]
        assert calls.done[:4] == expected, fields
        assert calls.done[4:] in ([], [f"start {number + 3}"]), "the draw of a prompt"
        half, number = number + 1, number + len(calls.done[4:]) + 2
        launched = after
    driver.finish(launched)


@pytest.mark.parametrize("behind", ["decodes", "prompt"])
def test_drafts_behind_copy_no_rows(deep: nn.Module, behind: str) -> None:
    """What tells when half of a forward is computed holds no layer's rows: drafts that follow,
    which wait for nothing, write them in place all the same.
    """
    driver = _driver(deep, row_count=8, row_tokens=4_096)
    keys_bytes = driver.executor.kv_bytes_per_token * 8 * 4_096 // LAYERS // 2
    ids = list(range(1, 8))
    before = driver.fill_rows(ids)

    drafts: dict[str, Any] = {"decodes": ids, "drafts": [[3]] * 7}
    if behind == "decodes":
        driver.finish(driver.launch(decodes=ids))
    else:
        prompt = make_prompt(8, 20)
        drafts["admitted"] = [admit(8, 7, prompt)]
        drafts["prefill_chunks"] = [chunk(8, 0, 10, 20), chunk(8, 10, 20, 20)]
    driver.finish(driver.launch(**drafts))
    assert mx.get_peak_memory() - before < keys_bytes // 2


def test_drafts_and_kept_blocks_leave_the_step_before_as_it_is(deep: nn.Module) -> None:
    """Several forwards that wait for each other cannot be cut in two; nor is what comes behind
    them started before they are done.
    """
    driver = _driver(deep)
    driver.step(**_joins(1, 1))
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
    raise AssertionError("there is nothing to go on with yet")


def test_rows_that_grow_and_come_from_blocks_are_the_same(deep: nn.Module) -> None:
    """Rows become more and longer, and one is filled from blocks, while the step before is
    computed; keys and values of eight bits too.
    """
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
        sampling=admit(1, 0, prompt).sampling,
        reused_tokens=32,
        reused_blocks=[one.hash for one in kept],
    )
    plans: list[dict[str, Any]] = [
        {"admitted": [admit(1, 0, prompt)], "prefill_chunks": [chunk(1, 0, 40, 40)]},
        {"decodes": [1]},
        {"decodes": [1], "keep_blocks": kept},
        {"decodes": [1]},
        {"row_count": 5, "row_tokens": 128, "decodes": [1]},
        {
            "row_count": 5,
            "row_tokens": 128,
            "admitted": [again],
            "prefill_chunks": [chunk(2, 32, 40, 40)],
            "decodes": [1],
        },
        *[{"row_count": 5, "row_tokens": 128, "decodes": [1, 2]}] * 4,
    ]
    whole, parts = Driver(deep), _driver(deep)
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


def test_a_model_of_few_layers_is_started_whole() -> None:
    """Its steps are launched behind each other as they are."""
    driver = _driver(make_llama(3))
    assert _run_ahead(driver, _plans()) == [0] * len(list(_plans()))


def test_other_caches_are_started_whole(make_model: Make) -> None:
    """Of a model with windows nobody knows which array is its half."""
    model = make_model("gemma3")
    driver = _driver(model)
    plans = [_joins(1, 2), *[{"decodes": [1]}] * 4]
    assert _run_ahead(driver, iter(plans)) == [0] * 5
    assert driver.tokens[1] == reference(model, PROMPTS[1], 5)[0]
