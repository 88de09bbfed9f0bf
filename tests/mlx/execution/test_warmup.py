"""Warm-up of a rank between loading and the first request, and the time of a prefill."""

import itertools
from collections.abc import Sequence

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.execution import prefill_time
from services.rank_worker.execution.prefill_time import LENGTHS, NOT_TIMED, time_prefill
from services.rank_worker.execution.warmup import warm_up
from services.rank_worker.kv_cache.rows.row_store import RowStore
from shared.clock import SystemClock
from shared.errors import ConfigError
from tests.mlx import models
from tests.mlx.executor_driver import ExecutorDriver, generate_alone, make_executor, make_prompt
from tests.mlx.models import MakeModel


@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("family", [*models.PLAIN_FAMILIES, *models.STATEFUL_FAMILIES])
def test_warm_up_leaves_no_row_or_receipt_and_changes_no_token(
    make_model: MakeModel, family: str, *, speculates: bool
) -> None:
    """The warm-up leaves no row and no receipt, and changes no token."""
    model = make_model(family)
    warm, fresh = ExecutorDriver(model), ExecutorDriver(model)
    warm_up(warm.executor, 4_096, speculates=speculates)
    prompt = make_prompt(3, 20)

    for driver in (warm, fresh):
        driver.start(1, 0, prompt)
        for _ in range(5):
            driver.step(decodes=[1])

    assert warm.tokens == fresh.tokens == {1: generate_alone(model, prompt, 6)}
    assert warm.digests == fresh.digests


@pytest.mark.parametrize(
    ("context_tokens", "longest", "verifies"),
    [(8, 8, False), (67, 67, False), (68, 68, False), (74, 68, False), (75, 75, True)],
)
def test_warm_up_fills_no_row_beyond_model_context(
    make_model: MakeModel,
    context_tokens: int,
    longest: int,
    verifies: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts are shortened for a small context, and drafts are left out where they do not fit."""
    lengths, rolled_back = [0], []
    lengthen, roll_back = RowStore._lengthen, RowStore.roll_back

    def noting(store: RowStore, slots: Sequence[int], counts: Sequence[int]) -> None:
        lengthen(store, slots, counts)
        lengths.extend(map(store.length, slots))

    def noting_cuts(store: RowStore, slot: int, length: int) -> None:
        rolled_back.append(length)
        roll_back(store, slot, length)

    executor = ExecutorDriver(make_model("llama")).executor
    monkeypatch.setattr(RowStore, "_lengthen", noting)
    monkeypatch.setattr(RowStore, "roll_back", noting_cuts)
    warm_up(executor, context_tokens, speculates=True)
    assert max(lengths) == longest
    assert bool(rolled_back) == verifies


def test_warm_up_refuses_model_with_nan_weights(make_model: MakeModel) -> None:
    """Weights of NaN are an error before the first request."""
    model = models.MODEL_FACTORIES["llama"]()
    model.update(tree_map(lambda one: one * mx.nan, model.parameters()))

    with pytest.raises(ConfigError, match="computes logits that are not finite"):
        warm_up(ExecutorDriver(model).executor, 4_096)


class SteadyClock(SystemClock):
    """A clock that advances by the same time with each call."""

    def __init__(self, seconds: float) -> None:
        self._times = itertools.count()
        self._seconds = seconds

    def now(self) -> float:
        """Return the next time."""
        return next(self._times) * self._seconds


def test_timed_prefill_is_that_of_longest_prompt_and_changes_no_token(
    make_model: MakeModel,
) -> None:
    """All lengths run while they are fast, no row and no receipt is left, and later tokens are
    those of a fresh executor."""
    model = make_model("llama")
    timed, fresh = ExecutorDriver(model), ExecutorDriver(model)
    found = time_prefill(timed.executor, SteadyClock(0.001), 4_096)
    prompt = make_prompt(3, 20)
    for driver in (timed, fresh):
        driver.start(1, 0, prompt)
        for _ in range(3):
            driver.step(decodes=[1])

    assert found.tokens == LENGTHS[-1]
    assert found.milliseconds == pytest.approx(1.0)
    assert timed.tokens == fresh.tokens == {1: generate_alone(model, prompt, 4)}
    assert timed.digests == fresh.digests


def test_prompt_is_not_timed_if_it_would_take_too_long(make_model: MakeModel) -> None:
    """On a slow device a short prompt must do: a start does not wait for a long one."""
    seconds = prefill_time.BUDGET_S / 2
    found = time_prefill(ExecutorDriver(make_model("llama")).executor, SteadyClock(seconds), 4_096)

    assert found.tokens == LENGTHS[0]
    assert found.milliseconds == pytest.approx(1e3 * seconds)


@pytest.mark.parametrize(
    ("grouped_tokens_max", "row_counts"),
    [(1_024, [*[1] * 6, 2]), (0, [1] * 6)],
    ids=["share", "apart"],
)
def test_several_prompts_are_run_at_once_where_they_share_a_forward(
    make_model: MakeModel,
    grouped_tokens_max: int,
    row_counts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels and memory for such forwards are prepared before the first request."""
    found: list[int] = []
    real = RowStore.resize

    def noting(store: RowStore, row_count: int, row_tokens: int) -> None:
        found.extend([row_count] if row_count else [])
        real(store, row_count, row_tokens)

    profile = ExecutionProfile(grouped_tokens_max=grouped_tokens_max)
    executor = make_executor(make_model("llama"), profile=profile)
    monkeypatch.setattr(RowStore, "resize", noting)
    assert time_prefill(executor, SteadyClock(0.001), 4_096).tokens == LENGTHS[-1]
    assert found == row_counts


@pytest.mark.parametrize(("tokens_max", "expected"), [(300, 256), (64, 64)])
def test_timed_prompt_fits_context_and_memory(
    make_model: MakeModel, tokens_max: int, expected: int
) -> None:
    """No prompt is longer than a row may be."""
    executor = ExecutorDriver(make_model("llama")).executor
    assert time_prefill(executor, SteadyClock(0.001), tokens_max).tokens == expected


def test_every_rank_votes_on_each_length_and_stops_after_the_first_refusal(
    make_model: MakeModel,
) -> None:
    """A vote is a collective: a rank that times nothing, such as one on a CPU beside GPUs, votes
    too."""
    votes: list[bool] = []

    def all_agree(vote: bool) -> bool:
        votes.append(vote)
        return vote

    executor = ExecutorDriver(make_model("llama")).executor
    assert time_prefill(executor, SteadyClock(0.001), 0, all_agree) == NOT_TIMED
    assert votes == [False]
    time_prefill(executor, SteadyClock(0.001), 300, all_agree)
    # The last votes are on two prompts of the longest length at once, and on a long one.
    assert votes == [False, True, True, False, False, False]


def test_timing_refuses_model_whose_logits_are_not_finite(make_model: MakeModel) -> None:
    """The error is that of the warm-up, with its remedy: longer prompts may be the first to show
    it."""
    model = models.MODEL_FACTORIES["llama"]()
    model.update(tree_map(lambda one: one * mx.nan, model.parameters()))

    with pytest.raises(ConfigError, match=r"set model\.dtype to float32"):
        time_prefill(ExecutorDriver(model).executor, SteadyClock(0.001), 4_096)


def test_nothing_is_timed_where_no_prompt_fits_or_a_rank_disagrees(make_model: MakeModel) -> None:
    """Without room for the shortest prompt nothing runs; and all ranks run the same prompts, so one
    rank's objection counts for all."""
    executor = ExecutorDriver(make_model("llama")).executor
    assert time_prefill(executor, SteadyClock(0.001), 63) == NOT_TIMED
    answers = iter([True, False, False, False])
    found = time_prefill(executor, SteadyClock(0.001), 4_096, lambda _: next(answers))
    assert found.tokens == LENGTHS[0]
