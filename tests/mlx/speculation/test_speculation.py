"""Drafts of plans: they change the number of tokens per step, never the tokens."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from shared.messages import Sampling
from tests.mlx.blocks.block_driver import BlockDriver, block_hash
from tests.mlx.executor_driver import GREEDY, ExecutorDriver, generate_alone, make_prompt
from tests.mlx.models import PLAIN_FAMILIES, MakeModel, SoftCappedModel
from tests.mlx.speculation.speculation_driver import NO_BLOCKS, SpeculationDriver, make_drafts

SETTINGS = {
    "greedy": GREEDY,
    "random": Sampling(seed=3, temperature=0.9),
    "cut": Sampling(seed=4, temperature=1.1, top_p=0.9, top_k=40, min_p=0.01, top_logprobs=2),
    "penalized": Sampling(
        seed=5,
        temperature=0.0,
        repetition_penalty=1.3,
        frequency_penalty=0.7,
        presence_penalty=0.5,
        top_logprobs=0,
    ),
    "all": Sampling(
        seed=2**63 - 1,
        temperature=0.8,
        top_p=0.95,
        frequency_penalty=0.9,
        logit_bias=[(7, 2.0), (9, -3.0)],
        top_logprobs=4,
    ),
}
PLANS = [(1, 1), (3, 0), (5, 2), (16, 16), (4, 4), (0, 0), (2, 1), (16, 5), (7, 3)]
"""(drafts, right drafts) of consecutive steps."""


def _generate_without_drafts(
    model: nn.Module, prompt: list[int], sampling: Sampling, count: int
) -> ExecutorDriver:
    driver = ExecutorDriver(model, row_count=1, row_tokens=128)
    driver.start(1, 0, prompt, sampling)
    for _ in range(count - 1):
        driver.step(decodes=[1])
    return driver


def _assert_same_generation(
    model: nn.Module, driver: ExecutorDriver, one: int, truth: ExecutorDriver
) -> None:
    got = driver.tokens[one]
    assert got == truth.tokens[1][: len(got)]
    known = truth.logprobs.get(1, [])[: len(got)]
    logprobs = driver.logprobs.get(one, [])
    assert len(logprobs) == len(known)
    for mine, theirs in zip(logprobs, known, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=2e-3)
        assert mine.top_logprobs == pytest.approx(theirs.top_logprobs, abs=2e-3)


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_verified_drafts_change_no_tokens_or_log_probabilities(
    make_model: MakeModel, family: str, sampling: Sampling
) -> None:
    """Right, wrong and partly right drafts change neither tokens nor log probabilities.

    Each step returns the accepted drafts and one token more.
    """
    model = make_model(family)
    prompt = make_prompt(11, 9)
    truth = _generate_without_drafts(model, prompt, sampling, 48)
    driver = SpeculationDriver(model, row_count=1, block_tokens=NO_BLOCKS)
    driver.start(1, 0, prompt, sampling)
    for count, right in PLANS:
        done = len(driver.tokens[1])
        drafts = make_drafts(truth.tokens[1], done, count, right)
        result = driver.step(decodes=[1], drafts={1: drafts})
        assert len(result.tokens[0]) == right + 1
    assert len(driver.tokens[1]) == 1 + sum(right + 1 for _, right in PLANS)
    _assert_same_generation(model, driver, 1, truth)


@pytest.mark.parametrize("forward_cost_tokens", [1, 64])
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_rows_with_different_drafts_in_one_step_keep_tokens(
    make_model: MakeModel, rows: int, forward_cost_tokens: int
) -> None:
    """Rows with different lengths and numbers of drafts get their own tokens, in one forward or
    several.
    """
    model = make_model("qwen3")
    settings = list(SETTINGS.values())
    prompts = {one: make_prompt(one, 3 + 4 * one) for one in range(1, rows + 1)}
    truths = {
        one: _generate_without_drafts(model, prompt, settings[one % 5], 30)
        for one, prompt in prompts.items()
    }
    driver = SpeculationDriver(
        model, row_count=rows, block_tokens=NO_BLOCKS, forward_cost_tokens=forward_cost_tokens
    )
    for one, prompt in prompts.items():
        driver.start(one, one - 1, prompt, settings[one % 5])
    for step in range(6):
        drafts = {}
        for one in prompts:
            count = (0, 3, 1, 8, 0, 16, 2, 5)[(one + step) % 8]
            right = min(count, (one * 7 + step * 3) % 5)
            expected = truths[one].tokens[1]
            drafts[one] = make_drafts(expected, len(driver.tokens[one]), count, right)
        driver.step(decodes=list(prompts), drafts=drafts)
    for one, truth in truths.items():
        _assert_same_generation(model, driver, one, truth)
        assert len(driver.tokens[one]) > 7


@pytest.mark.parametrize("forward_cost_tokens", [1, 64])
def test_row_moved_before_roll_back_continues_unchanged(
    make_model: MakeModel, forward_cost_tokens: int
) -> None:
    """A row that is moved between its verification and its roll-back continues unchanged.

    Meanwhile other rows join, leave, decode and move, and the arrays grow.
    """
    model = make_model("llama")
    prompts = {one: make_prompt(30 + one, 5 + one) for one in (1, 2, 3, 4)}
    truths = {one: generate_alone(model, prompt, 20) for one, prompt in prompts.items()}
    driver = SpeculationDriver(
        model, 3, 24, block_tokens=NO_BLOCKS, forward_cost_tokens=forward_cost_tokens
    )
    for one in (1, 2, 3):
        driver.start(one, one - 1, prompts[one])
    drafts = {one: make_drafts(truths[one], 1, 6, one) for one in (1, 2, 3)}
    driver.step(decodes=[1, 2, 3], drafts=drafts)
    driver.row_tokens, driver.row_count = 40, 5
    driver.step(dropped=[1], moves=[(3, 0)], roll_back=[2], decodes=[2])
    driver.step(roll_back=[], decodes=[2], drafts={2: make_drafts(truths[2], 5, 9, 2)})
    driver.row_tokens = 30
    driver.start(4, 4, prompts[4])
    driver.row_count = 4
    driver.step(moves=[(4, 2)], roll_back=[], decodes=[4])
    driver.step(decodes=[3, 2, 4], drafts={3: make_drafts(truths[3], 5, 2, 2)})
    driver.step(decodes=[3, 2, 4])

    for one in (2, 3, 4):
        assert driver.tokens[one] == truths[one][: len(driver.tokens[one])]
    assert [len(driver.tokens[one]) for one in (2, 3, 4)] == [10, 9, 4]


def test_new_sequence_gets_its_own_tokens_after_drop_with_accepted_drafts(
    make_model: MakeModel,
) -> None:
    """After a sequence is dropped with accepted drafts, the next one in its slot gets its own
    tokens.
    """
    model = make_model("qwen3")
    sampling = SETTINGS["all"]
    prompts = {1: make_prompt(61, 12), 2: make_prompt(62, 7)}
    truths = {one: generate_alone(model, prompt, 12, sampling) for one, prompt in prompts.items()}
    driver = SpeculationDriver(model, 1, block_tokens=NO_BLOCKS)
    driver.start(1, 0, prompts[1], sampling)
    driver.step(decodes=[1], drafts={1: make_drafts(truths[1], 1, 5, 4)})
    driver.step(dropped=[1], roll_back=[])
    driver.start(2, 0, prompts[2], sampling)
    driver.step(decodes=[2], drafts={2: make_drafts(truths[2], 1, 5, 4)})
    driver.step(decodes=[2])

    assert driver.tokens[1] == truths[1][:6]
    assert driver.tokens[2] == truths[2][:7]


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_blocks_kept_from_rows_with_drafts_hold_accepted_tokens_only(
    make_model: MakeModel, family: str
) -> None:
    """Blocks kept from rows with drafts equal the blocks kept without drafts.

    A block boundary may lie among rejected drafts, and a plan may keep blocks before the roll-back.
    """
    model = make_model(family)
    prompt = make_prompt(21, 10)
    plain = BlockDriver(model, 1, block_tokens=4)
    plain.start_from_blocks(1, 0, prompt)
    while len(plain.tokens[1]) < 36:
        plain.step(decodes=[1])
    driver = SpeculationDriver(model, 2, block_tokens=4)
    driver.start_from_blocks(1, 0, prompt)
    for count, right in PLANS[:-2]:
        drafts = make_drafts(plain.tokens[1], len(driver.tokens[1]), count, right)
        driver.step(decodes=[1], drafts={1: drafts})
        driver.step(roll_back=[])
    driver.step()

    def payload(of: BlockDriver, name: bytes) -> np.ndarray:
        found = of.executor.blocks.resident[name].payload
        return np.array(found).view(np.float32)

    names = [block_hash(driver.all_tokens(1)[:stop]) for stop in range(4, driver.lengths[1] + 1, 4)]
    assert len(names) >= 9
    assert set(driver.resident) == set(names) <= set(plain.resident)
    for name in names:
        np.testing.assert_allclose(payload(driver, name), payload(plain, name), atol=1e-4)


@pytest.mark.parametrize("forward_cost_tokens", [1, 64])
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("length", [20, 31, 32])
def test_rows_outside_step_stay_unchanged_while_others_verify_drafts(
    make_model: MakeModel, place: int, length: int, forward_cost_tokens: int
) -> None:
    """A row outside the step, even a full one, keeps its KV bit for bit while others verify
    drafts.
    """
    model = make_model("qwen3")
    driver = SpeculationDriver(
        model, 4, 32, block_tokens=NO_BLOCKS, forward_cost_tokens=forward_cost_tokens
    )
    driver.start(9, place, make_prompt(9, length))
    others = [slot for slot in range(4) if slot != place]
    for slot in others:
        driver.start(slot, slot, make_prompt(slot, 4 + 2 * slot))
    store = driver.executor.store
    before = np.array(store.read_block(place, 0, length))
    for count in (8, 3, 1):
        driver.step(decodes=others, drafts={others[0]: [1] * count, others[2]: [2]})

    np.testing.assert_array_equal(before, np.array(store.read_block(place, 0, length)))


@pytest.mark.parametrize("forward_cost_tokens", [1, 64])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_verifying_and_rolling_back_drafts_copies_no_kv_rows(
    make_model: MakeModel, family: str, forward_cost_tokens: int
) -> None:
    """Verifying, rolling back and moving never copy the rows of even one layer."""
    driver = SpeculationDriver(
        make_model(family),
        8,
        4_096,
        block_tokens=NO_BLOCKS,
        forward_cost_tokens=forward_cost_tokens,
    )
    layer_bytes = driver.executor.store.bytes_per_token * 8 * 4_096 // 3
    for one in range(6):
        driver.start(one, one, make_prompt(one, 5 + one))
    sequence_ids = list(range(6))

    def busy() -> None:
        ahead = driver.launch(decodes=sequence_ids[:3], drafts={0: [1] * 8, 2: [3]})
        for _ in range(3):
            launched = driver.launch(decodes=sequence_ids[3:], drafts={4: [1, 2], 5: [5] * 4})
            driver.finish(ahead)
            ahead = driver.launch(decodes=sequence_ids[:3], drafts={0: [1] * 8, 2: [3]})
            driver.finish(launched)
        driver.finish(ahead)
        driver.step(dropped=[1], moves=[(5, 1)], decodes=[0, 5, 2, 3, 4])

    busy()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    busy_again = [driver.launch(decodes=[0, 5, 2, 3, 4], drafts={0: [1] * 8, 3: [2]})]
    busy_again.append(driver.launch(roll_back=[], decodes=[5, 2], drafts={5: [1]}))
    for launched in busy_again:
        driver.finish(launched)
    driver.step(decodes=[0, 5, 2, 3, 4], drafts={0: [1] * 8})

    assert mx.get_peak_memory() - before < layer_bytes // 2


def test_model_computing_logits_of_all_positions_accepts_right_drafts(
    make_model: MakeModel,
) -> None:
    """A model whose head cannot be limited to some positions accepts right drafts with unchanged
    tokens.
    """
    model = SoftCappedModel(make_model("qwen3"))
    prompts = {1: make_prompt(1, 8), 2: make_prompt(2, 3)}
    truths = {one: generate_alone(model, prompt, 9) for one, prompt in prompts.items()}
    driver = SpeculationDriver(model, block_tokens=NO_BLOCKS)
    for one, prompt in prompts.items():
        driver.start(one, one, prompt)
    driver.step(decodes=[1, 2], drafts={1: make_drafts(truths[1], 1, 4, 3)})
    driver.step(decodes=[1, 2], drafts={2: make_drafts(truths[2], 2, 5, 4)})

    assert driver.tokens == {1: truths[1][:6], 2: truths[2][:7]}


def test_receipts_differ_between_ranks_that_draw_different_tokens(make_model: MakeModel) -> None:
    """Equal plans give equal receipts; a rank that draws other tokens has another receipt."""

    def run(seed: int) -> list[bytes]:
        driver = SpeculationDriver(make_model("qwen3"), block_tokens=NO_BLOCKS)
        driver.start(1, 0, make_prompt(1, 9), GREEDY)
        prompt = make_prompt(2, 9)
        driver.start(2, 1, prompt, Sampling(seed=seed, top_logprobs=1))
        driver.step(decodes=[1, 2], drafts={2: [3, 4, 5]})
        return driver.digests

    assert run(1) == run(1)
    assert run(1)[-1] != run(2)[-1]


def _tokens_of_rank_1(model: nn.Module, drafts: list[int], theirs: list[int]) -> Any:
    """Return the tokens of rank 1 for a step whose ids rank 0 determines."""
    rank_0_ids = [[theirs[0]], theirs]
    driver = SpeculationDriver(
        model,
        block_tokens=NO_BLOCKS,
        rank=1,
        world_size=2,
        sum_ids=lambda ids: ids + mx.array(rank_0_ids.pop(0), dtype=mx.int32),
    )
    driver.start(1, 0, make_prompt(1, 9))
    return driver.step(decodes=[1], drafts={1: drafts}).tokens


def test_all_ranks_accept_drafts_that_rank_0_accepts(make_model: MakeModel) -> None:
    """Every rank accepts drafts by the ids of rank 0."""
    model = make_model("qwen3")

    assert _tokens_of_rank_1(model, [4, 5, 6], [4, 5, 9, 1]) == [[4, 5, 9]]
    assert _tokens_of_rank_1(model, [4, 5, 6], [4, 5, 6, 1]) == [[4, 5, 6, 1]]
    assert _tokens_of_rank_1(model, [4, 5, 6], [5, 5, 6, 1]) == [[5]]
