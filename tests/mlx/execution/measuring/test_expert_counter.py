"""Counts of assignments to experts against a count by hand, for models of several families."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.execution.measurements import EXPERT_COUNTS_PER_S, StepMeasurements
from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.model.sharding.apply import apply_split
from shared.model.sharding.shares import Split
from tests.mlx.executor_driver import (
    ExecutorDriver,
    admission,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.sharding.in_process_world import unlinked_collectives
from tests.mlx.sharding.moe_models import EXPERTS, LAYERS, MOE_FAMILIES, make_moe_model, moe_config

K = 2
CHUNK = 9
"""Tokens of the first chunk of a prompt, which only fills caches."""
PROMPTS = {1: make_prompt(1, 12), 2: make_prompt(2, 20), 3: make_prompt(3, 17)}
UNBATCHED = {"deepseek_v41", "llama4", "muse_spark"}
"""Families whose rows are not batched, or that run on Metal only."""
_PADS = ExecutionProfile(pads_prefill=True)


def _driver(model: nn.Module, counter: ExpertCounter | None, **changes: Any) -> ExecutorDriver:
    driver = ExecutorDriver(model)
    driver.executor = make_executor(model, expert_counter=counter, **changes)
    return driver


def _generate(driver: ExecutorDriver) -> None:
    """Prefill two prompts together and one in two chunks, with an idle row, and decode."""
    driver.step(
        admitted=[admission(1, 0, PROMPTS[1]), admission(2, 2, PROMPTS[2])],
        prefill_chunks=[prefill_chunk(2, 0, 20, 20), prefill_chunk(1, 0, 12, 12)],
    )
    driver.step(
        admitted=[admission(3, 3, PROMPTS[3])],
        prefill_chunks=[prefill_chunk(3, 0, CHUNK, 17)],
        decodes=[1, 2],
    )
    driver.step(prefill_chunks=[prefill_chunk(3, CHUNK, 17, 17)], decodes=[1, 2])
    for _ in range(4):
        driver.step(decodes=[1, 2, 3])


def _softmax_router(block: Any, x: Any) -> Any:
    """Softmax does not change the order, so the highest products are chosen."""
    return x @ np.array(block.gate.weight).T


def _sigmoid_router(block: Any, x: Any) -> Any:
    """DeepSeek-V3: a sigmoid, and a bias that only the choice depends on."""
    scores = 1 / (1 + np.exp(-(x @ np.array(block.gate.weight).T)))
    return scores + np.array(block.gate.e_score_correction_bias)


ROUTERS = {
    "qwen3_moe": _softmax_router,
    "qwen2_moe": _softmax_router,
    "deepseek_v3": _sigmoid_router,
}
"""By family; qwen2_moe and deepseek_v3 have shared experts too."""


def _count_by_hand(family: str, model: Any, texts: dict[int, list[int]]) -> dict[int, list[int]]:
    """Run the layers one by one over whole texts, and each router in numpy."""
    counts: dict[int, list[int]] = {}
    for sequence_id, tokens in texts.items():
        hidden = model.model.embed_tokens(mx.array([tokens]))
        mask = mx.tril(mx.ones((len(tokens), len(tokens)), dtype=mx.bool_))
        for number, layer in enumerate(model.layers):
            after = hidden + layer.self_attn(layer.input_layernorm(hidden), mask=mask)
            if hasattr(layer.mlp, "switch_mlp"):
                x = np.array(layer.post_attention_layernorm(after))[0]
                chosen = np.argsort(-ROUTERS[family](layer.mlp, x), axis=-1)[:, :K]
                if sequence_id == 3 and number == LAYERS - 1:
                    # Nothing depends on the last layer's experts where only caches are filled.
                    chosen = chosen[CHUNK:]
                row = counts.setdefault(number, [0] * EXPERTS)
                for expert in chosen.ravel():
                    row[expert] += 1
            hidden = after + layer.mlp(layer.post_attention_layernorm(after))
    return counts


@pytest.mark.parametrize("profile", [ExecutionProfile(), _PADS], ids=["plain", "padded"])
@pytest.mark.parametrize("family", ROUTERS)
def test_counts_equal_count_by_hand(family: str, profile: ExecutionProfile) -> None:
    """Every real token of every layer counts once for each of its experts; padding does not."""
    model = make_moe_model(family)
    counter = ExpertCounter(model, 0, "none", 1)
    driver = _driver(model, counter, profile=profile)
    _generate(driver)
    # The last generated token has not been computed.
    texts = {one: PROMPTS[one] + driver.tokens[one][:-1] for one in PROMPTS}
    found = {one.layer: one.counts for one in counter.report()[0]}
    assert found == _count_by_hand(family, make_moe_model(family), texts)


@pytest.mark.parametrize("family", [*ROUTERS, "gpt_oss", "qwen3_next"])
def test_tokens_and_receipts_are_same_without_counting(family: str) -> None:
    """Counting changes no token and no receipt."""
    model = make_moe_model(family)
    found = []
    for counts in (False, True):
        counter = ExpertCounter(model, 0, "none", 3) if counts else None
        driver = _driver(model, counter)
        _generate(driver)
        found.append((driver.tokens, driver.digests, driver.logprobs))
    assert found[0] == found[1]


def test_counts_are_read_in_every_nth_step_only() -> None:
    """The host reads nothing in between; then it has all assignments so far."""
    model = make_moe_model("qwen3_moe")
    counter = ExpertCounter(model, 0, "none", 4)
    driver = _driver(model, counter)
    driver.start(1, 0, PROMPTS[1])
    sums = []
    for _ in range(8):
        driver.step(decodes=[1])
        sums.append(int(counter.counts[0].sum()) // K)
    # The ids of these steps are 2 to 9.
    assert sums == [0, 0, 15, 15, 15, 15, 19, 19]


def test_drafts_count_as_computed_and_padding_does_not() -> None:
    """A row with more drafts than another widens the forward, and only real tokens count."""
    model = make_moe_model("qwen3_moe")
    counter = ExpertCounter(model, 0, "none", 1)
    driver = _driver(model, counter)
    driver.start(1, 0, PROMPTS[1])
    driver.start(2, 2, PROMPTS[2])
    before = counter.counts
    driver.step(decodes=[1, 2], drafts=[[5, 6, 7], []])
    assert (counter.counts - before).sum(axis=1).tolist() == [(4 + 1) * K] * LAYERS


def test_counts_go_on_where_those_of_device_wrap_around() -> None:
    """The device's unsigned 32-bit numbers may overflow in months of service."""
    model = make_moe_model("qwen3_moe")
    counter = ExpertCounter(model, 0, "none", 1)
    first, second = (np.full(LAYERS * EXPERTS, one, dtype=np.uint32) for one in (2**32 - 3, 4))
    counter.read(mx.array(first))
    counter.read(mx.array(second))
    assert counter.counts.tolist() == [[2**32 + 4] * EXPERTS] * LAYERS


@pytest.mark.parametrize("shares", [(), (1, 4)])
def test_each_rank_reports_its_own_experts_of_divided_layers(shares: tuple[int, ...]) -> None:
    """Two ranks' reports are the whole table, by default halves of it, else as settings say."""
    parts = []
    for rank in range(2):
        model = make_moe_model("qwen3_moe")
        split = Split("expert", rank, 2, expert_shares=shares)
        apply_split(model, moe_config("qwen3_moe"), split, unlinked_collectives(rank, 2))
        counter = ExpertCounter(model, rank, "expert", 1)
        counter.read(mx.arange(LAYERS * EXPERTS).astype(mx.uint32))
        parts.append(counter.report()[0])
    first = 1 if shares else EXPERTS // 2
    for number, (one, other) in enumerate(zip(*parts, strict=True)):
        assert (one.layer, one.first, other.first) == (number, 0, first)
        assert one.experts == other.experts == EXPERTS
        whole = list(range(number * EXPERTS, (number + 1) * EXPERTS))
        assert one.counts + other.counts == whole
        assert len(one.counts) == first


def test_large_tables_are_reported_more_rarely() -> None:
    """A rank sends a bounded number of counts per second, and each assignment once."""
    model = make_moe_model("qwen3_moe")
    counter = ExpertCounter(model, 0, "none", 1)
    measurements = StepMeasurements(1, 0, counter)
    assert measurements.take() is None
    pause = 3
    counter.counts = np.zeros((LAYERS, pause * EXPERT_COUNTS_PER_S // LAYERS), dtype=np.uint64)
    counter._totals = [counter.counts.shape[1]] * LAYERS
    measurements._reported_counts = counter.counts
    sent = []
    for second in range(7):
        counter.counts = counter.counts + np.uint64(1)
        report = measurements.take()
        sent.append(sum(one.counts[0] for one in report.experts) if report else 0)
        assert second % pause == 0 or report is None
    assert sent == [LAYERS, 0, 0, pause * LAYERS, 0, 0, pause * LAYERS]


@pytest.mark.parametrize("family", sorted(set(MOE_FAMILIES) - UNBATCHED))
def test_every_family_counts_each_token_once_per_expert(family: str) -> None:
    """Each layer of experts has as many assignments as tokens were computed, times k."""
    model = make_moe_model(family)
    counter = ExpertCounter(model, 0, "none", 1)
    driver = _driver(model, counter)
    driver.start(1, 0, PROMPTS[1])
    driver.start(2, 2, PROMPTS[2])
    for _ in range(3):
        driver.step(decodes=[1, 2])
    computed = len(PROMPTS[1]) + len(PROMPTS[2]) + 3 * 2
    sums = counter.counts.sum(axis=1).tolist()
    assert sums
    assert sums == [computed * K] * len(sums)
