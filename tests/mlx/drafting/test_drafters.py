"""Drafts that ranks propose: they change the number of tokens per step, never the tokens."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.execution.warmup import warm_up
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter
from shared.messages import Sampling
from tests.mlx import models
from tests.mlx.drafting.drafter_driver import (
    DrafterDriver,
    draft_model_of,
    perturb_weights,
    random_eagle_head,
)
from tests.mlx.executor_driver import generate_alone, make_prompt
from tests.mlx.models import PLAIN_FAMILIES, MakeModel
from tests.mlx.speculation.speculation_driver import NO_BLOCKS
from tests.mlx.speculation.test_speculation import SETTINGS

DRAFTS: dict[str, Callable[[MakeModel, str], LoadedDrafter]] = {
    "near": lambda make, name: draft_model_of(
        perturb_weights(models.MODEL_FACTORIES[name](), make(name), 0.05)
    ),
    "far": lambda make, _: draft_model_of(make("llama")),
    "head": lambda *_: random_eagle_head(),
    "two layers": lambda *_: random_eagle_head(layers=2, bias=True),
}
"""Functions that make a drafter for a model of a family."""

COUNTS = [1, 3, 0, 5, 16, -1, 4, 0, 2, -1, -1, 7]


@pytest.fixture(params=DRAFTS)
def make_draft(
    request: pytest.FixtureRequest, make_model: MakeModel
) -> Callable[[str], LoadedDrafter]:
    """Return a function that makes a drafter for a model of a family."""
    return lambda family: DRAFTS[request.param](make_model, family)


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_drafters_change_no_tokens_for_any_draft_counts(
    make_model: MakeModel,
    make_draft: Callable[[str], LoadedDrafter],
    family: str,
    sampling: Sampling,
) -> None:
    """The tokens of a sequence are the same with any numbers of drafts and skipped draft rows."""
    model = make_model(family)
    prompt = make_prompt(11, 9)
    driver = DrafterDriver(model, make_draft(family), row_count=1)
    driver.start(1, 0, prompt, sampling)
    for count in COUNTS:
        driver.step(decodes=[1], counts={1: count})
        driver.check_rows()
    got = driver.tokens[1]

    assert len(got) > len(COUNTS)
    assert got == generate_alone(model, prompt, len(got), sampling)


@pytest.mark.parametrize("forward_cost_tokens", [1, 64])
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_rows_with_different_draft_counts_in_one_step_keep_tokens(
    make_model: MakeModel,
    make_draft: Callable[[str], LoadedDrafter],
    rows: int,
    forward_cost_tokens: int,
) -> None:
    """Rows with different lengths and draft counts get their own tokens, in one forward or
    several.
    """
    model = make_model("qwen3")
    settings = list(SETTINGS.values())
    prompts = {one: make_prompt(one, 3 + 4 * one) for one in range(1, rows + 1)}
    driver = DrafterDriver(
        model,
        make_draft("qwen3"),
        row_count=rows,
        row_tokens=160,
        forward_cost_tokens=forward_cost_tokens,
    )
    for one, prompt in prompts.items():
        driver.start(one, one - 1, prompt, settings[one % 5])
    for step in range(6):
        counts = {one: (0, 3, 1, 8, -1, 16, 2, 5)[(one + step) % 8] for one in prompts}
        driver.step(decodes=list(prompts), counts=counts)
        driver.check_rows()

    for one, prompt in prompts.items():
        got = driver.tokens[one]
        assert got == generate_alone(model, prompt, len(got), settings[one % 5])


def test_draft_row_moved_before_roll_back_continues_unchanged(
    make_model: MakeModel, make_draft: Callable[[str], LoadedDrafter]
) -> None:
    """A row that is moved between its verification and its roll-back continues unchanged.

    Meanwhile other rows join, leave, decode and move, and the arrays grow.
    """
    model = make_model("llama")
    prompts = {one: make_prompt(30 + one, 5 + one) for one in (1, 2, 3, 4)}
    driver = DrafterDriver(model, make_draft("llama"), 3, 40)
    for one in (1, 2, 3):
        driver.start(one, one - 1, prompts[one])
    driver.step(decodes=[1, 2, 3], counts={1: 6, 2: 3, 3: 5})
    driver.row_tokens, driver.row_count = 64, 5
    driver.step(dropped=[1], moves=[(3, 0)], roll_back=[2], decodes=[2], counts={})
    driver.step(roll_back=[], decodes=[2], counts={2: 9})
    driver.start(4, 4, prompts[4])
    driver.row_count = 4
    driver.step(moves=[(4, 2)], roll_back=[], decodes=[4], counts={4: -1})
    driver.step(decodes=[3, 2, 4], counts={3: 2, 4: 2})
    driver.check_rows()
    driver.step(decodes=[3, 2, 4])
    driver.start(5, 3, prompts[1])
    driver.step(decodes=[3, 2, 4, 5], counts=dict.fromkeys([3, 2, 4, 5], 4))
    driver.check_rows()

    for one, prompt in {**prompts, 5: prompts[1]}.items():
        if one != 1:
            got = driver.tokens[one]
            assert got == generate_alone(model, prompt, len(got))


def test_plan_making_draft_rows_fewer_and_longer_changes_no_tokens(
    make_model: MakeModel, make_draft: Callable[[str], LoadedDrafter]
) -> None:
    """In one plan most rows leave, the verified row moves, and a longer sequence joins."""
    model = make_model("llama")
    prompts = {one: make_prompt(40 + one, 5 + one) for one in (1, 2, 3, 4)}
    prompts[5] = make_prompt(45, 60)
    driver = DrafterDriver(model, make_draft("llama"), 4, 40)
    for one in (1, 2, 3, 4):
        driver.start(one, one - 1, prompts[one])
    driver.step(decodes=[1, 2, 3, 4], counts={1: 2, 3: 6})
    driver.row_count, driver.row_tokens = 2, 128
    driver.step(dropped=[1, 2, 4], moves=[(3, 0)], roll_back=[3], decodes=[3], counts={})
    driver.start(5, 1, prompts[5])
    for counts in ({3: 4, 5: 4}, {3: 1, 5: -1}, {3: 2, 5: 3}):
        driver.step(decodes=[3, 5], counts=counts)
        driver.check_rows()

    for one in (3, 5):
        got = driver.tokens[one]
        assert got == generate_alone(model, prompts[one], len(got))


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_model_drafting_for_itself_has_all_drafts_accepted(
    make_model: MakeModel, family: str, sampling: Sampling
) -> None:
    """Drafts are drawn with the keys and settings of the position that verifies them."""
    model = make_model(family)
    driver = DrafterDriver(model, draft_model_of(model), row_count=3)
    prompts = {one: make_prompt(20 + one, 4 + 5 * one) for one in (1, 2, 3)}
    for one, prompt in prompts.items():
        driver.start(one, one - 1, prompt, sampling)
    for counts in ({1: 3, 2: 1, 3: 5}, {1: 16, 3: 2}, {1: -1, 2: 4, 3: 4}, {1: 2, 2: 2, 3: -1}):
        driver.step(decodes=[1, 2, 3], counts=counts)

    assert driver.accepted_drafts == driver.proposed_drafts == 39


@pytest.mark.parametrize("vocab", [192, 256])
def test_draft_model_with_other_vocabulary_padding_proposes_only_known_ids(
    make_model: MakeModel, vocab: int
) -> None:
    """A draft model with another padded vocabulary changes no tokens and proposes known ids
    only.
    """
    model = make_model("qwen3")
    small: Any = models.MODEL_FACTORIES["llama"]()
    weight = small.model.embed_tokens.weight
    small.model.embed_tokens.weight = mx.concatenate([weight, weight])[:vocab]
    small.lm_head.weight = mx.concatenate([small.lm_head.weight] * 2)[:vocab]
    # By far the likeliest ids are outside the vocabulary of the model.
    small.lm_head.weight[211:] = small.lm_head.weight[211:] * 9.0
    prompt = [*make_prompt(5, 9), 210, 205]
    sampling = Sampling(seed=7, temperature=1.0)
    driver = DrafterDriver(model, draft_model_of(small), row_count=1)
    driver.start(1, 0, prompt, sampling)
    drafts: list[int] = []
    for _ in range(8):
        launched = driver.launch(decodes=[1], counts={1: 4})
        driver.finish(launched)
        assert launched.sample is not None
        drafts += launched.sample.drafts.read_ids()

    got = driver.tokens[1]
    assert got == generate_alone(model, prompt, len(got), sampling)
    assert max(drafts) < min(vocab, 211)


def test_rows_built_from_blocks_get_drafts_and_unchanged_tokens(
    make_model: MakeModel, make_draft: Callable[[str], LoadedDrafter]
) -> None:
    """Sequences that reuse blocks or come back after a drop get drafts and unchanged tokens."""
    model = make_model("qwen3")
    driver = DrafterDriver(model, make_draft("qwen3"), 2, block_tokens=8)
    prompt = make_prompt(41, 30)
    driver.start_from_blocks(1, 0, prompt)
    driver.step(decodes=[1], counts={1: 5})
    driver.step(dropped=[1], roll_back=[])
    again = [*prompt, *driver.tokens[1]]
    assert driver.start_from_blocks(2, 1, again) >= 24
    for count in (3, 0, 4, 2):
        driver.step(decodes=[2], counts={2: count})
        driver.check_rows()

    got = [*driver.tokens[1], *driver.tokens[2]]
    assert got == generate_alone(model, prompt, len(got))


def test_receipts_differ_between_ranks_that_propose_different_drafts(make_model: MakeModel) -> None:
    """Ranks with different proposals have different receipts, even if no draft is accepted."""
    model = make_model("qwen3")
    digests = []
    for seed in (3, 3, 4):
        driver = DrafterDriver(model, random_eagle_head(seed=seed), row_count=1)
        driver.start(1, 0, make_prompt(3, 12))
        driver.step(decodes=[1], counts={1: 4})
        assert driver.accepted_drafts == 0
        digests.append(driver.digests[-1])

    assert digests[0] == digests[1] != digests[2]


def test_rank_after_drafter_warm_up_gives_tokens_and_digests_of_fresh_rank(
    make_model: MakeModel, make_draft: Callable[[str], LoadedDrafter]
) -> None:
    """The warm-up runs the drafter; afterwards the rank gives the tokens and digests of a fresh
    rank.
    """
    model = make_model("qwen3")
    warm, fresh = (DrafterDriver(model, make_draft("qwen3"), row_count=2) for _ in range(2))
    asked: list[list[int]] = []
    propose = warm.executor.proposer.propose

    def recorded(sequences: Any, lengths: Any, counts: Any, forwards: Any) -> Any:
        asked.append(list(counts))
        return propose(sequences, lengths, counts, forwards)

    warm.executor.proposer.propose = recorded  # type: ignore[method-assign]
    warm_up(warm.executor, 4_096, speculates=True)
    assert asked == [[4, 4], [5, 1]]
    for driver in (warm, fresh):
        driver.start(1, 0, make_prompt(3, 20))
        driver.step(decodes=[1], counts={1: 3})
        driver.check_rows()

    assert warm.tokens == fresh.tokens
    assert warm.digests == fresh.digests


@pytest.mark.parametrize(
    "make", [draft_model_of, lambda _: random_eagle_head()], ids=["model", "head"]
)
def test_proposing_and_rolling_back_drafts_copies_no_draft_rows(
    make_model: MakeModel, make: Callable[[nn.Module], LoadedDrafter]
) -> None:
    """Proposing, following and rolling back write draft rows in place while another step runs."""
    model = make_model("qwen3")
    driver = DrafterDriver(model, make(model), 6, 4_096, block_tokens=NO_BLOCKS)
    layers = 3 if driver.executor.proposer.needs_chunks else 1
    layer_bytes = driver.executor.proposer.bytes_per_token * 6 * 4_096 // layers
    sequence_ids = list(range(6))
    for one in sequence_ids:
        driver.start(one, one, make_prompt(one, 5 + one))

    def busy() -> None:
        ahead = driver.launch(decodes=sequence_ids[:3], counts={0: 5, 2: 1})
        for _ in range(3):
            launched = driver.launch(decodes=sequence_ids[3:], counts={4: 2, 5: 4})
            driver.finish(ahead)
            ahead = driver.launch(decodes=sequence_ids[:3], counts={0: 5, 2: 1})
            driver.finish(launched)
        driver.finish(ahead)

    busy()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    busy()

    assert mx.get_peak_memory() - before < layer_bytes / 2
