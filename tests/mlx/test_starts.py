"""On a device with a queue forwards are started in two parts: nothing else changes."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from services.rank_worker.device_use import DeviceUse
from services.rank_worker.executor import Launched
from shared.messages import KeptBlock
from tests.mlx.driver import Driver, admit, chunk, executor_of, make_prompt, reference
from tests.mlx.models import make_llama

Make = Callable[[str], nn.Module]

LAYERS = 6
PROMPTS = {one: make_prompt(one, 5 + 13 * one) for one in (1, 2, 3, 4)}


@pytest.fixture(scope="module")
def deep() -> nn.Module:
    """A model of which one layer is a small part."""
    return make_llama(LAYERS)


def _driver(model: nn.Module) -> Driver:
    driver = Driver(model)
    driver.executor = executor_of(model, use=DeviceUse(has_queue=True))
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
    """Yield prompts in one forward and in several, alone and beside decodes, drafts and moves."""
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
    flight: list[Launched] = []

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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return what is started and waited for: the call, and the bytes of its arrays."""
    found: list[tuple[str, int]] = []
    real: tuple[Any, Any] = mx.async_eval, mx.eval

    def note(call: str, arrays: Sequence[Any]) -> None:
        leaves: Any = tree_flatten(arrays)
        size = sum(one.nbytes for _, one in leaves)
        if size:
            found.append((call, size))

    def start(*arrays: Any) -> None:
        note("start", arrays)
        real[0](*arrays)

    def wait(*arrays: Any) -> None:
        note("wait", arrays)
        real[1](*arrays)

    monkeypatch.setattr(mx, "async_eval", start)
    monkeypatch.setattr(mx, "eval", wait)
    return found


def test_no_layer_is_written_while_it_may_still_be_read(
    deep: nn.Module, calls: list[tuple[str, int]]
) -> None:
    """The first half of each forward is started when that half of the one before is computed, and
    the rest when all of it is. What the first half ends in is the KV of the layer in the middle.
    """
    driver = _driver(deep)
    # Keys of one layer: all that a token takes, by layers and by keys and values.
    keys = driver.executor.kv_bytes_per_token * driver.row_count * driver.row_tokens // LAYERS // 2
    driver.step(**_joins(1, 1))
    calls.clear()
    launched = driver.launch(**_joins(2, 3))
    shown = ["half" if size == keys else "rest" for _, size in calls]
    done = [f"{call} {part}" for (call, _), part in zip(calls, shown, strict=True)]
    one_more = ["wait half", "start half", "wait rest", "start rest"]
    drawn = ["start rest"]
    assert done[: 2 + 4 + 4] == ["start half", "start rest", *one_more, *one_more]
    assert done[10:] in (drawn, ["wait rest", *drawn])

    calls.clear()
    after = driver.executor.launch(driver.plan(decodes=[1, 2]), lambda: calls.append(("settle", 0)))
    assert [call for call, _ in calls if call != "wait" or _ == keys][:4] == [
        "wait",
        "start",
        "settle",
        "start",
    ]
    driver.finish(launched)
    driver.finish(after)


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
    assert driver.executor.waits(plan)
    driver.finish(driver.executor.launch(plan, None))
    assert len(driver.tokens[1]) >= 3


def _never() -> None:
    raise AssertionError("there is nothing to go on with yet")


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
