"""Prompts whose rows kernels write in place: chunks of any rows and lengths in one forward."""

import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.execution import prefill, prefill_time
from services.rank_worker.execution.prefill_time import time_prefill
from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.row_layers import make_row_layer
from services.rank_worker.kv_cache.rows.row_store import RowStore
from services.rank_worker.kv_cache.rows.row_views import prompt_blocks
from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.model.fast_path.kernels import tensor_cores
from services.rank_worker.model.fast_path.kernels.attention import head_kernels
from services.rank_worker.model.fast_path.kernels.attention.head_kernels import (
    AttentionShape,
    AttentionWeights,
)
from services.rank_worker.model.fast_path.kernels.attention.prompt_attention import PromptAttention
from services.rank_worker.model.fast_path.kernels.attention.row_places import RowPlaces
from services.rank_worker.model.fast_path.opening import FastPathSettings
from shared import limits
from shared.clock import ManualClock
from tests.mlx.execution.fast_path.attention_models import make
from tests.mlx.executor_driver import (
    ExecutorDriver,
    admission,
    generate_with_mlx_lm,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.sharding.moe_models import LAYERS, make_moe_model

pytestmark = pytest.mark.usefixtures("kernels_on_cpu")

PROMPTS = {one: make_prompt(one, length) for one, length in {1: 150, 2: 20, 3: 33, 4: 66}.items()}


@pytest.fixture(autouse=True)
def _tensor_cores_multiply_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (head_kernels, tensor_cores):
        monkeypatch.setattr(module, "DTYPES", (mx.float32,))


def _driver(
    model: nn.Module, *, all_agree: Callable[[bool], bool] = bool, **changes: Any
) -> ExecutorDriver:
    driver = ExecutorDriver(model, row_count=4, row_tokens=192)
    driver.executor = make_executor(
        model,
        profile=ExecutionProfile(has_queue=True, pads_prefill=True),
        fast_path=FastPathSettings("cuda", all_agree, prompts_in_place=True),
        **changes,
    )
    return driver


def _chunk(sequence: int, start: int, stop: int) -> Any:
    return prefill_chunk(sequence, start, stop, len(PROMPTS[sequence]))


def _serve(driver: ExecutorDriver) -> None:
    """Prefill four prompts while others decode: whole ones, parts of some, and two of one."""
    driver.start(2, 1, PROMPTS[2])
    driver.step(
        admitted=[admission(one, one - 1, PROMPTS[one]) for one in (1, 3, 4)],
        prefill_chunks=[_chunk(4, 0, 66), _chunk(1, 0, 70), _chunk(3, 0, 17)],
        decodes=[2],
    )
    # No chunk of this plan ends a prompt.
    driver.step(prefill_chunks=[_chunk(1, 70, 90)])
    driver.step(
        prefill_chunks=[_chunk(1, 90, 100), _chunk(1, 100, 149), _chunk(3, 17, 33)], decodes=[2, 4]
    )
    driver.step(prefill_chunks=[_chunk(1, 149, 150)], decodes=[2, 3, 4])
    for _ in range(3):
        driver.step(decodes=[1, 2, 3, 4])


@pytest.mark.parametrize(
    ("pairs_max", "forward_max"),
    [(prefill.IN_PLACE_PAIRS_MAX, limits.FORWARD_TOKENS_MAX), (2_000, 2_048), (1 << 21, 96)],
    ids=["all", "some", "in several forwards"],
)
def test_prompts_written_in_place_give_tokens_of_mlx_lm(
    pairs_max: int, forward_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where forwards with more pairs of tokens than a limit are computed by MLX."""
    monkeypatch.setattr(prefill, "IN_PLACE_PAIRS_MAX", pairs_max)
    monkeypatch.setattr(limits, "FORWARD_TOKENS_MAX", forward_max)
    model = make("qwen3", 4, 2, 16)
    driver = _driver(model)
    assert driver.executor.store.prefills_in_place
    _serve(driver)
    for one, tokens in driver.tokens.items():
        assert tokens == generate_with_mlx_lm(model, PROMPTS[one], len(tokens))[0]


@pytest.mark.parametrize(("head_dim", "growth"), [(32, 0.1), (32, 1.0), (40, 1.0)])
def test_attention_to_keys_whose_scores_grow_is_that_of_mlx(head_dim: int, growth: float) -> None:
    """Sums so far are multiplied anew when a score is far above those before it."""
    shape = AttentionShape(2, 1, head_dim, 0, is_traditional=False, normalizes=False)
    cached, count, dim = 40, 150, shape.head_dim
    numbers = mx.random.normal((4, cached + count, dim), key=mx.random.key(1))
    positions = mx.arange(cached + count)[:, None]
    # All queries have the same first number, and the keys' first numbers are the scores.
    numbers[:2, :, 0] = 1.0
    numbers[2, :, :1] = growth * positions
    layer = make_row_layer([BlockPart(1, dim, mx.float32)] * 2, 0)
    layer.resize(1, cached + count, 0, 0)
    for one, stored in zip(numbers[2:], layer.arrays, strict=True):
        stored[0, 0, :cached] = one[:cached]
    mx.eval(layer.arrays)
    lengths = mx.arange(cached, cached + count, dtype=mx.int32)
    blocks = mx.array(prompt_blocks([count]), dtype=mx.int32)
    places = RowPlaces(lengths, mx.zeros_like(lengths), 1, blocks=blocks)
    norm = mx.zeros((dim,))
    weights = AttentionWeights(norm, norm, mx.array([1.0, 0.0, 0.0]))
    new = numbers[:, cached:].swapaxes(0, 1).reshape(count, -1)
    attended = PromptAttention().attend(shape, weights, new, layer.arrays, places, None)
    expected = mx.fast.scaled_dot_product_attention(
        numbers[None, :2, cached:],
        *(one[None, None] for one in numbers[2:]),
        scale=1.0,
        mask="causal",
    )
    assert mx.allclose(attended, expected[0].swapaxes(0, 1).reshape(count, -1), atol=1e-4).item()


@pytest.mark.parametrize("differs_here", [True, False], ids=["here", "on another rank"])
def test_kernel_of_prompts_that_differs_is_left_and_decodes_keep_their_kernels(
    differs_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX attends to prompts then, as the state that operators see says; on all ranks, which vote
    equally often whether they differ or not."""
    votes: list[bool] = []
    model = make("qwen3", 4, 2, 16)

    def agree(vote: bool) -> bool:
        votes.append(vote)
        return vote

    _driver(model, all_agree=agree)
    vote_count = len(votes)
    votes.clear()

    def last_vote_fails(vote: bool) -> bool:
        votes.append(vote)
        return vote and len(votes) < vote_count

    if differs_here:
        attend = PromptAttention.attend
        monkeypatch.setattr(PromptAttention, "attend", lambda *given: 2 * attend(*given))
    model = make("qwen3", 4, 2, 16)
    driver = _driver(model, all_agree=last_vote_fails)
    reason = "attention 0 differs by" if differs_here else "a difference on another rank"
    state = driver.executor.layers_state
    assert state.startswith(f"fast path with kernels; MLX attends to prompts: {reason}")
    assert votes == [True] * (vote_count - 1) + [not differs_here]
    assert driver.executor.store.writes_in_place
    assert not driver.executor.store.prefills_in_place
    _serve(driver)
    for one, tokens in driver.tokens.items():
        assert tokens == generate_with_mlx_lm(model, PROMPTS[one], len(tokens))[0]


def test_plan_with_prompts_in_place_does_not_wait_for_earlier_steps() -> None:
    """MLX does not use their rows, unless they have more pairs of tokens or are restored."""
    driver = _driver(make("qwen3", 4, 2, 16))
    waits = driver.executor.waits_for_earlier_steps
    driver.step()
    admitted = admission(1, 0, PROMPTS[1])
    assert not waits(driver.plan(admitted=[admitted], prefill_chunks=[_chunk(1, 0, 150)]))
    for start, stop in [(2_000, 3_500), (0, 2_049), (8_190, 8_193)]:
        assert waits(driver.plan(prefill_chunks=[prefill_chunk(1, start, stop, stop)]))
    # In several forwards they may have half as many pairs each.
    for length, count, are_too_long in [(1_000, 3, False), (1_600, 1, False), (1_600, 2, True)]:
        chunks = [prefill_chunk(one, 0, length, length) for one in range(1, count + 1)]
        assert waits(driver.plan(prefill_chunks=chunks)) == are_too_long
    restored = type(admitted)(**{**_fields(admitted), "reused_tokens": 8})
    assert waits(driver.plan(admitted=[restored]))


def test_result_before_is_sent_when_the_first_of_several_forwards_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not wait until all of them are built, as the device computes the first meanwhile."""
    monkeypatch.setattr(limits, "FORWARD_TOKENS_MAX", 96)
    model = make("qwen3", 4, 2, 16)
    driver = _driver(model)
    driver.start(2, 1, PROMPTS[2])
    order: list[str] = []
    real = RowStore.prefill_in_place

    def noting(*given: Any) -> Any:
        order.append("forward built")
        return real(*given)

    monkeypatch.setattr(RowStore, "prefill_in_place", noting)
    before = driver.executor.launch(driver.plan(decodes=[2]))

    def finish() -> None:
        order.append("result sent")
        driver.finish(before)

    plan = driver.plan(
        admitted=[admission(one, one - 1, PROMPTS[one]) for one in (1, 3, 4)],
        prefill_chunks=[_chunk(4, 0, 66), _chunk(3, 0, 33), _chunk(1, 0, 70)],
        decodes=[2],
    )
    driver.finish(driver.executor.launch(plan, finish))
    assert order == ["forward built", "forward built", "result sent", "forward built"]
    driver.step(prefill_chunks=[_chunk(1, 70, 150)], decodes=[2, 3, 4])
    driver.step(decodes=[1, 2, 3, 4])
    for one, tokens in driver.tokens.items():
        assert tokens == generate_with_mlx_lm(model, PROMPTS[one], len(tokens))[0]


def test_prompt_to_which_mlx_attends_runs_before_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the last of those that are timed, and none of the others prepares MLX's attention."""
    monkeypatch.setattr(prefill_time, "LENGTHS", (16, 32))
    monkeypatch.setattr(prefill_time, "LONG", 64)
    monkeypatch.setattr(prefill, "IN_PLACE_PAIRS_MAX", 64 * 32 - 1)
    driver = _driver(make("qwen3", 4, 2, 16))
    found: list[bool] = []
    for name in ("prefill", "prefill_in_place"):
        real = getattr(RowStore, name)

        def noting(*given: Any, name: str = name, real: Any = real) -> Any:
            found.append(name == "prefill_in_place")
            return real(*given)

        monkeypatch.setattr(RowStore, name, noting)
    assert time_prefill(driver.executor, ManualClock(), 64).tokens == 32
    assert [is_in_place for is_in_place, _ in itertools.groupby(found)] == [True, False]


def _fields(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_forward_of_prompts_in_place_is_padded_as_a_whole(widths: list[int]) -> None:
    """A chunk by itself is not padded, and chunks of one sequence have a forward each."""
    _serve(_driver(make("qwen3", 4, 2, 16)))
    assert widths == [32, 160, 32, 16, 80, 1]


def test_experts_of_prompts_in_place_are_counted_without_padding() -> None:
    """Tokens that pad a forward are computed and not counted."""
    counter = ExpertCounter(model := make_moe_model("qwen3_moe"), 0, "none", 1)
    driver = _driver(model, expert_counter=counter)
    assert driver.executor.store.prefills_in_place
    driver.step(
        admitted=[admission(one, one - 1, PROMPTS[one]) for one in (2, 3)],
        prefill_chunks=[_chunk(2, 0, 20), _chunk(3, 0, 17)],
    )
    # Two experts per token.
    assert counter.counts.sum(axis=1).tolist() == [2 * 37] * LAYERS
