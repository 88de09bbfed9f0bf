"""Canary of a rank: sums with known results, and a prompt that leaves no state."""

import hashlib
import tracemalloc
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx import nn

from services.rank_worker.canary import long_prompt, sums
from services.rank_worker.canary.canary import Canary, activations
from services.rank_worker.peers.collectives import Collectives
from shared import limits
from shared.clock import ManualClock, SystemClock
from shared.errors import CanaryFailed
from tests.mlx.executor_driver import ExecutorDriver, make_executor, make_prompt
from tests.mlx.models import MakeModel
from tests.support.orders import join_order

HIDDEN = 48
ORDER = join_order(size=2)


class SimulatedPeers(Collectives):
    """Collectives of one rank; the summands of the other ranks are computed here."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(None, rank, world_size)
        self.sums = 0
        self.wrong_at = -1
        """Index of the sum with one wrong element; -1: none."""
        self.is_stale = False
        """Whether each sum returns the previous result of the same size."""
        self._before: mx.array | None = None

    def sum_ids(self, ids: mx.array) -> mx.array:
        """Return the sum over all ranks."""
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


class EchoingCollectives(Collectives):
    """Collectives of rank 0 of two that return the rank's own summand as the sum."""

    def __init__(self) -> None:
        super().__init__(None, 0, 2)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 16, 50, limits.RANKS_MAX])
def test_expected_canary_sums_are_exact_in_every_dtype(world_size: int) -> None:
    """Known sums are whole numbers up to 256, so every order of addition is exact in bfloat16.

    They differ between elements and between repetitions.
    """
    for repetition in range(4):
        expected = sums.expected_sum(world_size, repetition)
        parts = [sums.summand(rank, world_size, repetition) for rank in range(world_size)]
        most = np.sum(np.abs(np.array(parts, dtype=np.int64)), axis=0).max()
        assert most <= 256
        assert len(set(expected.tolist())) > 1
        assert (expected != sums.expected_sum(world_size, repetition + 1)).any()
        total = mx.zeros(expected.shape, dtype=mx.bfloat16)
        for part in reversed(parts):
            total = total + mx.array(part).astype(mx.bfloat16)
        assert (np.array(total.astype(mx.float32)) == expected).all()


def test_canary_sum_with_elements_shifted_by_buffer_length_has_most_elements_wrong() -> None:
    """In a sum shifted by a typical buffer length, most elements differ from the expected ones."""
    place = sums.period_indices(70_000, 2)
    for shift in (1, 2, 64, 1_024, 1_000, 4_096, 8_192, 16_384, 32_768):
        assert (place[:-shift] != place[shift:]).mean() > 0.5


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_canary_checks_sums_from_one_element_to_whole_chunk_in_every_dtype(dtype: mx.Dtype) -> None:
    """The canary sums 1 element to a whole chunk, in the dtype of the activations and others.

    All ranks have the same digests.
    """
    worlds = [SimulatedPeers(rank, 3) for rank in range(3)]
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
def test_one_wrong_element_of_any_sum_fails_canary(wrong_at: int) -> None:
    """One wrong element in any repetition fails the canary after all other sums have run."""
    right, wrong = SimulatedPeers(0, 2), SimulatedPeers(0, 2)
    sums.check_sums(right, HIDDEN, mx.float32, SystemClock())
    wrong.wrong_at = wrong_at
    with pytest.raises(CanaryFailed, match=r"1 of 7 known sums over 2 ranks are wrong here\. sum"):
        sums.check_sums(wrong, HIDDEN, mx.float32, SystemClock())
    assert wrong.sums == right.sums


def test_canary_fails_when_sum_repeats_previous_result() -> None:
    """A sum that repeats the previous result fails the canary, even if all ranks agree on it."""
    world = SimulatedPeers(1, 2)
    world.is_stale = True
    with pytest.raises(CanaryFailed, match="7 of 7 known sums"):
        sums.check_sums(world, HIDDEN, mx.float32, SystemClock())


def test_checking_canary_sum_takes_under_four_bytes_of_memory_per_element() -> None:
    """Checking a sum takes less than four bytes of memory per element besides the sum."""
    hidden_size = 4_096
    elements = sums.CHUNK_TOKENS * hidden_size
    tracemalloc.start()
    try:
        *_, (_, size, dtype, _) = sums._sum_sizes(hidden_size, mx.bfloat16)
        assert size == elements
        sums._check_sum(EchoingCollectives(), "sum", size, dtype, 1, SystemClock())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * elements


@pytest.mark.parametrize("count", [1, sums.COMPARED_ELEMENTS - 1, sums.COMPARED_ELEMENTS + 3])
def test_canary_error_gives_index_of_wrong_element_in_whole_sum(count: int) -> None:
    """A sum is compared in blocks; the error gives the index of a wrong element in the
    whole sum.
    """
    index = np.arange(count)
    period = len(sums.expected_sum(2, 0))
    place = sums.period_indices(count, 2)
    assert (place == (index + index // sums.STRIDE) % period).all()
    expected = sums.expected_sum(2, 0)
    right = mx.array(expected)[mx.array(place)]
    wrong = mx.concatenate([right[:-1], right[-1:] + 1])
    digests = [hashlib.blake2b(), hashlib.blake2b()]
    assert not sums._compare(right, expected, place, digests[0].update)
    message = sums._compare(wrong, expected, place, digests[1].update)
    last = expected[place[-1]]
    assert message == (
        f"element {count - 1:,} is {last + 1} instead of {last}, and 1 of {count:,} are wrong"
    )
    assert digests[0].digest() != digests[1].digest()


def test_canary_error_shows_digits_in_which_wrong_element_differs() -> None:
    """Two different numbers look different, however small the difference."""
    expected = sums.expected_sum(2, 0)
    place = sums.period_indices(4, 2)
    right = mx.array(expected)[mx.array(place)].astype(mx.float32)
    wrong = right * (1 + 2**-22)
    message = sums._compare(wrong, expected, place, lambda _: None)

    shown = message.split()
    assert shown[3] != shown[6].rstrip(",")
    assert np.float32(shown[3]) == wrong[int(shown[1])].item()


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_canary_takes_activation_width_and_dtype_from_embedding(
    make_model: MakeModel, family: str
) -> None:
    """Width and dtype of the activations are those of the embedding, quantized or not."""
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
def test_canary_prompt_leaves_executor_without_rows_receipts_or_changed_tokens(
    make_model: MakeModel, family: str, tokens: int, *, bits: bool
) -> None:
    """The canary prompt leaves no row or receipt, changes no later token, and has a stable
    digest.
    """
    model = make_model(family)
    checked, fresh = ExecutorDriver(model), ExecutorDriver(model)
    alone = Collectives(None, 0, 1)
    found = [
        long_prompt.check_prompt(
            executor, alone, tokens + 1, SystemClock(), budget_s=120.0, exact=bits
        )
        for executor in (checked.executor, make_executor(model))
    ]
    assert found[0].name == f"prompt of {tokens:,} tokens"
    assert found[0].bytes == 4 * tokens
    assert found[0].digest == found[1].digest

    prompt = make_prompt(3, 20)
    for driver in (checked, fresh):
        driver.start(1, 0, prompt)
        for _ in range(5):
            driver.step(decodes=[1])
    assert checked.tokens == fresh.tokens
    assert checked.digests == fresh.digests


def test_canary_prompt_digest_changes_when_one_weight_changes(make_model: MakeModel) -> None:
    """A small change of one weight changes the digest of the canary prompt."""
    model = make_model("llama")
    clock, alone = SystemClock(), Collectives(None, 0, 1)

    def digest() -> bytes:
        finding = long_prompt.check_prompt(
            make_executor(model), alone, 300, clock, budget_s=1e9, exact=True
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


def test_canary_prompt_lengths_rise_to_4500_tokens_or_context_limit() -> None:
    """The lengths of canary prompts rise to 4,500 tokens or to the context limit."""
    assert long_prompt.prompt_lengths(100_000) == [64, 256, 1_024, 4_500]
    assert long_prompt.prompt_lengths(255) == [64, 255]
    assert long_prompt.prompt_lengths(8) == [8]
    assert max(long_prompt.prompt_ids(4_500, 211)) < 211


def test_longest_canary_prompt_fits_memory_of_one_kv_row() -> None:
    """The longest canary prompt fits a row of whole growth steps, at least the warm-up length."""
    assert long_prompt.longest_prompt_within(4_608) == 4_607
    assert long_prompt.longest_prompt_within(4_607) == 4_351
    assert long_prompt.longest_prompt_within(512) == 511
    for nothing in (0, 255, 256):
        assert long_prompt.longest_prompt_within(nothing) <= 255
    assert long_prompt.longest_prompt_within(0) == long_prompt.PROMPT_TOKENS[0]
    assert long_prompt.longest_prompt_within(2**31 - 1) > 4_500


class SimulatedRowLimits(Collectives):
    """Collectives of rank 0 of two; the other rank reports the given longest row."""

    def __init__(self, other: int) -> None:
        super().__init__(None, 0, 2)
        self._other = other

    def sum_ids(self, ids: mx.array) -> mx.array:
        """Return the sum over both ranks."""
        return ids + mx.array([[0], [self._other]]) if ids.shape == (2, 1) else ids


@pytest.mark.parametrize(
    ("own", "other", "tokens"),
    [(10_000, 10_000, 999), (700, 10_000, 511), (10_000, 700, 511), (2**40, 0, 64)],
)
def test_canary_prompt_is_no_longer_than_smallest_rank_memory_allows(
    make_model: MakeModel, own: int, other: int, tokens: int
) -> None:
    """The prompt of the canary is no longer than the rank with the least memory allows."""
    # Every prompt takes 0 s on this clock, so a slow machine cannot end the canary early.
    canary = Canary(ORDER, SimulatedRowLimits(other), ManualClock())
    rows: list[int] = []
    executor = make_executor(make_model("llama"))
    prepare: Any = executor.prepare

    def recorded(plan: Any, *settle: Any) -> Any:
        rows.append(plan.row_tokens)
        return prepare(plan, *settle)

    executor.prepare = recorded  # type: ignore[method-assign, assignment]
    canary.check_prompt(executor, 1_000, own, on_cpu=False)

    assert [one.name for one in canary.findings] == [f"prompt of {tokens:,} tokens"]
    assert max(rows) <= max(256, min(own, other))


class TickingClock(ManualClock):
    """Clock that advances by one second at each reading."""

    def now(self) -> float:
        """Return the time in seconds, one second after the previous reading."""
        self.advance(1.0)
        return super().now()


@pytest.mark.parametrize(
    ("wanted_s", "deadline_s", "tokens"), [(0.0, 3_600.0, 999), (3_600.0, 1e-6, 64), (1e-9, 9, 64)]
)
def test_canary_time_limit_or_load_deadline_stops_longer_prompts(
    make_model: MakeModel, wanted_s: float, deadline_s: float, tokens: int
) -> None:
    """A longer prompt runs only within the configured time and the load deadline."""
    order = msgspec.structs.replace(ORDER, canary_prompt_s=wanted_s, load_deadline_s=deadline_s)
    canary = Canary(order, SimulatedRowLimits(10_000), TickingClock())
    canary.check_prompt(make_executor(make_model("llama")), 1_000, 10_000, on_cpu=False)
    assert [one.name for one in canary.findings] == [f"prompt of {tokens:,} tokens"]


def test_canary_computes_nothing_for_one_rank_or_when_off(make_model: MakeModel) -> None:
    """A world of one rank, or with the canary off, computes nothing."""
    one = msgspec.structs.replace(ORDER, world_size=1)
    off = msgspec.structs.replace(ORDER, canary=False)
    for order in (one, off):
        canary = Canary(order, Collectives(None, 0, order.world_size), SystemClock())
        canary.check_sums(make_model("llama"))
        canary.check_prompt(make_executor(make_model("llama")), 100, 100, on_cpu=True)
        assert canary.findings == []
