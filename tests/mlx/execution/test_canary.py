"""What a rank computes before it serves: sums that are known, and a prompt that leaves no trace."""

import hashlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx import nn

from services.rank_worker.canary import long_prompt, sums
from services.rank_worker.canary.canary import Canary, activations
from services.rank_worker.collectives import Collectives
from shared import limits
from shared.clock import ManualClock, SystemClock
from shared.errors import CanaryFailed
from tests.mlx.executor_driver import Driver, executor_of, make_prompt
from tests.orders import join_order

Make = Callable[[str], nn.Module]
HIDDEN = 48
ORDER = join_order(size=2)


class Added(Collectives):
    """A rank of a world whose other ranks are computed here, by the same formula."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(None, rank, world_size)
        self.sums = 0
        self.wrong_at = -1
        """Which sum has one element wrong."""
        self.is_stale = False
        """Every sum is the one before, where they are of one size."""
        self._before: mx.array | None = None

    def sum_ids(self, ids: mx.array) -> mx.array:
        """Add what every rank would."""
        place = sums.period_indices(ids.size, self.world_size)
        own = np.array(ids.astype(mx.float32))
        repetitions = range(sums.SMALL_REPETITIONS + 1)
        (repetition,) = [
            one
            for one in repetitions
            if (sums.summand(self.rank, self.world_size, one)[place] == own).all()
        ][:1]
        parts = [
            mx.array(sums.summand(rank, self.world_size, repetition)[place])
            for rank in range(self.world_size)
        ]
        total = parts[0].astype(ids.dtype)
        for part in parts[1:]:
            total = total + part.astype(ids.dtype)
        if self.sums == self.wrong_at:
            total = mx.concatenate([total[:-1], total[-1:] + 1])
        self.sums += 1
        stale, self._before = self._before, total
        if self.is_stale and stale is not None and stale.shape == total.shape:
            return stale.astype(ids.dtype)
        return total


class Echo(Collectives):
    """Rank 0 of two whose sums are what it gave itself."""

    def __init__(self) -> None:
        super().__init__(None, 0, 2)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 16, 50, limits.RANKS_MAX])
def test_sums_are_exact_in_every_type(world_size: int) -> None:
    """Whatever the order of addition: whole numbers below 256, and never the same everywhere."""
    for repetition in range(4):
        due = sums.expected_sum(world_size, repetition)
        parts = [sums.summand(rank, world_size, repetition) for rank in range(world_size)]
        most = np.sum(np.abs(np.array(parts, dtype=np.int64)), axis=0).max()
        assert most <= 256
        assert len(set(due.tolist())) > 1
        assert (due != sums.expected_sum(world_size, repetition + 1)).any()
        total = mx.zeros(due.shape, dtype=mx.bfloat16)
        for part in reversed(parts):
            total = total + mx.array(part).astype(mx.bfloat16)
        assert (np.array(total.astype(mx.float32)) == due).all()


def test_shifted_pieces_show() -> None:
    """No piece of a sum equals another one at a distance that buffers have."""
    place = sums.period_indices(70_000, 2)
    for shift in (1, 2, 64, 1_024, 1_000, 4_096, 8_192, 16_384, 32_768):
        assert (place[:-shift] != place[shift:]).mean() > 0.5


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_is_summed(dtype: mx.Dtype) -> None:
    """One element, 4 KiB, one more than 32 KiB, a chunk; in the activations' type and the others.

    All ranks digest the same.
    """
    worlds = [Added(rank, 3) for rank in range(3)]
    found = [sums.check_sums(one, HIDDEN, dtype, SystemClock()) for one in worlds]

    size = dtype.size
    names = {one.name: one.bytes for one in found[0]}
    text = str(dtype).rpartition(".")[2]
    assert names[f"sum of 1 {text}"] == size
    assert names[f"sum of 4 KiB of {text}"] == 4_096
    assert names[f"sum of 32 KiB and 1 of {text}"] == 32_768 + size
    assert names[f"sum of 2,048 x 48 {text}"] == 2_048 * 48 * size
    assert {"sum of 1 int32", "sum of 4 KiB of int32", "sum of 1 float32"} <= set(names)
    assert [one.digest for one in found[0]] == [one.digest for one in found[1]]
    assert [one.name for one in found[0]] == [one.name for one in found[2]]
    assert all(one.microseconds >= 0.0 for one in found[0])


@pytest.mark.parametrize("wrong_at", [0, 5, 57])
def test_one_wrong_element_of_one_sum_is_found(wrong_at: int) -> None:
    """In any repetition; every other sum is still added, so that no peer waits."""
    right, wrong = Added(0, 2), Added(0, 2)
    sums.check_sums(right, HIDDEN, mx.float32, SystemClock())
    wrong.wrong_at = wrong_at
    with pytest.raises(CanaryFailed, match=r"1 of 7 known sums over 2 ranks are wrong here\. sum"):
        sums.check_sums(wrong, HIDDEN, mx.float32, SystemClock())
    assert wrong.sums == right.sums


def test_stale_sums_are_found() -> None:
    """A sum that is that of the repetition before is wrong, though all ranks may agree on it."""
    world = Added(1, 2)
    world.is_stale = True
    with pytest.raises(CanaryFailed, match="7 of 7 known sums"):
        sums.check_sums(world, HIDDEN, mx.float32, SystemClock())


def test_checking_a_sum_takes_little_memory() -> None:
    """Beside the sum itself: for each element less than a float, whatever the model's width."""
    hidden_size = 4_096
    elements = sums.CHUNK_TOKENS * hidden_size
    tracemalloc.start()
    try:
        _, size, dtype = sums._sum_sizes(hidden_size, mx.bfloat16)[-1]
        assert size == elements
        sums._check_sum(Echo(), "sum", size, dtype, 1, SystemClock())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * elements


@pytest.mark.parametrize("count", [1, sums.COMPARED_ELEMENTS - 1, sums.COMPARED_ELEMENTS + 3])
def test_blocks_change_nothing(count: int) -> None:
    """A sum is compared in parts: places run on over their borders, and a wrong element is named
    by its place in the whole."""
    index = np.arange(count)
    period = len(sums.expected_sum(2, 0))
    place = sums.period_indices(count, 2)
    assert (place == (index + index // sums.STRIDE) % period).all()
    due = sums.expected_sum(2, 0)
    right = mx.array(due)[mx.array(place)]
    wrong = mx.concatenate([right[:-1], right[-1:] + 1])
    digests = [hashlib.blake2b(), hashlib.blake2b()]
    assert not sums._compare(right, due, place, digests[0].update)
    said = sums._compare(wrong, due, place, digests[1].update)
    last = due[place[-1]]
    assert said == (
        f"element {count - 1:,} is {last + 1} instead of {last}, and 1 of {count:,} are wrong"
    )
    assert digests[0].digest() != digests[1].digest()


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_activations_are_read_off_the_embedding(make_model: Make, family: str) -> None:
    """Width and type are those of what the embedding gives, quantized or not."""
    model = make_model(family)
    hidden = model.args.hidden_size
    assert activations(model) == (hidden, mx.float32)
    embedding = nn.QuantizedEmbedding(100, 64)
    embedding.set_dtype(mx.bfloat16)
    assert activations(nn.Sequential(embedding)) == (64, mx.bfloat16)
    assert activations(nn.Sequential(nn.Linear(2, 2))) == (4_096, mx.float32)


@pytest.mark.parametrize(
    ("family", "tokens", "bits"),
    [
        ("llama", 2_599, True),
        ("llama", 600, False),
        ("gemma3", 600, True),
        ("qwen3_next", 600, True),
    ],
)
def test_the_prompt_leaves_a_fresh_executor(
    make_model: Make, family: str, tokens: int, *, bits: bool
) -> None:
    """It leaves no row, no receipt and no other token behind, and digests the same twice."""
    model = make_model(family)
    sung, fresh = Driver(model), Driver(model)
    alone = Collectives(None, 0, 1)
    found = [
        long_prompt.check_prompt(
            executor, alone, tokens + 1, SystemClock(), budget_s=120.0, exact=bits
        )
        for executor in (sung.executor, executor_of(model))
    ]
    assert found[0].name == f"prompt of {tokens:,} tokens"
    assert found[0].bytes == 4 * tokens
    assert found[0].digest == found[1].digest

    prompt = make_prompt(3, 20)
    for driver in (sung, fresh):
        driver.start(1, 0, prompt)
        for _ in range(5):
            driver.step(decodes=[1])
    assert sung.tokens == fresh.tokens
    assert sung.digests == fresh.digests


def test_other_weights_are_another_digest(make_model: Make) -> None:
    """What a rank computes otherwise shows, even in the last bits where devices are alike."""
    model = make_model("llama")
    clock, alone = SystemClock(), Collectives(None, 0, 1)

    def digest() -> bytes:
        finding = long_prompt.check_prompt(
            executor_of(model), alone, 300, clock, budget_s=1e9, exact=True
        )
        return finding.digest

    before = digest()
    weight = model.model.layers[0].mlp.down_proj.weight
    kept = mx.array(weight)
    model.model.layers[0].mlp.down_proj.weight = weight * 1.001
    try:
        assert digest() != before
    finally:
        model.model.layers[0].mlp.down_proj.weight = kept
    assert digest() == before


def test_lengths_fit_the_context() -> None:
    """Rising lengths, the last 4,500 or what the context allows."""
    assert long_prompt.prompt_lengths(100_000) == [64, 256, 1_024, 4_500]
    assert long_prompt.prompt_lengths(255) == [64, 255]
    assert long_prompt.prompt_lengths(8) == [8]
    assert max(long_prompt.prompt_ids(4_500, 211)) < 211


def test_prompts_fit_their_memory() -> None:
    """A row is rounded up to whole steps; the shortest prompt is what the warm-up has had room
    for."""
    assert long_prompt.longest_prompt_within(4_608) == 4_607
    assert long_prompt.longest_prompt_within(4_607) == 4_351
    assert long_prompt.longest_prompt_within(512) == 511
    for nothing in (0, 255, 256):
        assert long_prompt.longest_prompt_within(nothing) <= 255
    assert long_prompt.longest_prompt_within(0) == long_prompt.PROMPT_TOKENS[0]
    assert long_prompt.longest_prompt_within(2**31 - 1) > 4_500


class Rooms(Collectives):
    """Rank 0 of two, the other one with as much room as it is told."""

    def __init__(self, other: int) -> None:
        super().__init__(None, 0, 2)
        self._other = other

    def sum_ids(self, ids: mx.array) -> mx.array:
        """Add what rank 1 would."""
        return ids + mx.array([[0], [self._other]]) if ids.shape == (2, 1) else ids


@pytest.mark.parametrize(
    ("own", "other", "tokens"),
    [(10_000, 10_000, 999), (700, 10_000, 511), (10_000, 700, 511), (2**40, 0, 64)],
)
def test_the_prompt_is_as_long_as_the_poorest_rank_has_room(
    make_model: Make, own: int, other: int, tokens: int
) -> None:
    """No row of the canary is longer than all ranks can hold, and none differs."""
    # Every prompt takes 0 s on this clock, so a slow machine cannot end the canary early.
    canary = Canary(ORDER, Rooms(other), ManualClock())
    rows: list[int] = []
    executor = executor_of(make_model("llama"))
    prepare: Any = executor.prepare

    def noted(plan: Any, *settle: Any) -> Any:
        rows.append(plan.row_tokens)
        return prepare(plan, *settle)

    executor.prepare = noted  # type: ignore[method-assign, assignment]
    canary.check_prompt(executor, 1_000, own, on_cpu=False)

    assert [one.name for one in canary.findings] == [f"prompt of {tokens:,} tokens"]
    assert max(rows) <= max(256, min(own, other))


class TickingClock(ManualClock):
    """Clock that advances by one second at each reading."""

    def now(self) -> float:
        self.advance(1.0)
        return super().now()


@pytest.mark.parametrize(
    ("wanted_s", "deadline_s", "tokens"), [(0.0, 3_600.0, 999), (3_600.0, 1e-6, 64), (1e-9, 9, 64)]
)
def test_no_prompt_is_begun_that_would_miss_the_deadline(
    make_model: Make, wanted_s: float, deadline_s: float, tokens: int
) -> None:
    """What an operator allows for it counts, within the time that loading has."""
    order = msgspec.structs.replace(ORDER, canary_prompt_s=wanted_s, load_deadline_s=deadline_s)
    canary = Canary(order, Rooms(10_000), TickingClock())
    canary.check_prompt(executor_of(make_model("llama")), 1_000, 10_000, on_cpu=False)
    assert [one.name for one in canary.findings] == [f"prompt of {tokens:,} tokens"]


def test_one_rank_has_nobody_to_compare_with(make_model: Make) -> None:
    """Nor is anything computed where the canary is off."""
    one = msgspec.structs.replace(ORDER, world_size=1)
    off = msgspec.structs.replace(ORDER, canary=False)
    for order in (one, off):
        canary = Canary(order, Collectives(None, 0, order.world_size), SystemClock())
        canary.check_sums(make_model("llama"))
        canary.check_prompt(executor_of(make_model("llama")), 100, 100, on_cpu=True)
        assert canary.findings == []
