"""Drafts that ranks propose change how many tokens a step gives, and never which."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.execution.warmup import warm_up
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter
from shared.messages import Sampling
from tests.mlx import models
from tests.mlx.drafting.drafter_driver import DraftDriver, draft_model, eagle, perturbed
from tests.mlx.executor_driver import alone, make_prompt
from tests.mlx.models import PLAIN
from tests.mlx.speculation.speculation_driver import NO_BLOCKS
from tests.mlx.speculation.test_speculation import SETTINGS

Make = Callable[[str], nn.Module]

DRAFTS: dict[str, Callable[[Make, str], LoadedDrafter]] = {
    "near": lambda make, name: draft_model(perturbed(models.MAKERS[name](), make(name), 0.05)),
    "far": lambda make, _: draft_model(make("llama")),
    "head": lambda *_: eagle(),
    "two layers": lambda *_: eagle(layers=2, bias=True),
}
"""Proposers for a model of a family."""

COUNTS = [1, 3, 0, 5, 16, -1, 4, 0, 2, -1, -1, 7]


@pytest.fixture(params=DRAFTS)
def make_draft(request: pytest.FixtureRequest, make_model: Make) -> Callable[[str], LoadedDrafter]:
    """Return what makes a proposer for a model of a family."""
    return lambda family: DRAFTS[request.param](make_model, family)


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_drafts_change_no_tokens(
    make_model: Make, make_draft: Callable[[str], LoadedDrafter], family: str, sampling: Sampling
) -> None:
    """One sequence with ever other numbers of drafts, none, and steps that its draft row misses:
    the text is the one without drafts, and the draft row follows."""
    model = make_model(family)
    prompt = make_prompt(11, 9)
    driver = DraftDriver(model, make_draft(family), row_count=1)
    driver.open(1, 0, prompt, sampling)
    for count in COUNTS:
        driver.step(decodes=[1], counts={1: count})
        driver.check_rows()
    got = driver.tokens[1]

    assert len(got) > len(COUNTS)
    assert got == alone(model, prompt, len(got), sampling)


@pytest.mark.parametrize("forward_cost_tokens", [1, 64])
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_rows_with_any_counts_share_a_step(
    make_model: Make,
    make_draft: Callable[[str], LoadedDrafter],
    rows: int,
    forward_cost_tokens: int,
) -> None:
    """Rows of unequal lengths with unequal numbers of drafts, without, and left behind: each gets
    its own text, by one forward or several, and draft rows hold what the plans say."""
    model = make_model("qwen3")
    settings = list(SETTINGS.values())
    prompts = {one: make_prompt(one, 3 + 4 * one) for one in range(1, rows + 1)}
    driver = DraftDriver(
        model,
        make_draft("qwen3"),
        row_count=rows,
        row_tokens=160,
        forward_cost_tokens=forward_cost_tokens,
    )
    for one, prompt in prompts.items():
        driver.open(one, one - 1, prompt, settings[one % 5])
    for step in range(6):
        counts = {one: (0, 3, 1, 8, -1, 16, 2, 5)[(one + step) % 8] for one in prompts}
        driver.step(decodes=list(prompts), counts=counts)
        driver.check_rows()

    for one, prompt in prompts.items():
        got = driver.tokens[one]
        assert got == alone(model, prompt, len(got), settings[one % 5])


def test_draft_rows_join_leave_and_move(
    make_model: Make, make_draft: Callable[[str], LoadedDrafter]
) -> None:
    """Between the step that verifies and the plan that cuts the row, others join, leave, decode
    and move, rows are made longer and more, and the row itself is moved: it goes on unchanged."""
    model = make_model("llama")
    prompts = {one: make_prompt(30 + one, 5 + one) for one in (1, 2, 3, 4)}
    driver = DraftDriver(model, make_draft("llama"), 3, 40)
    for one in (1, 2, 3):
        driver.open(one, one - 1, prompts[one])
    driver.step(decodes=[1, 2, 3], counts={1: 6, 2: 3, 3: 5})
    driver.row_tokens, driver.row_count = 64, 5
    driver.step(dropped=[1], moves=[(3, 0)], settle=[2], decodes=[2], counts={})
    driver.step(settle=[], decodes=[2], counts={2: 9})
    driver.open(4, 4, prompts[4])
    driver.row_count = 4
    driver.step(moves=[(4, 2)], settle=[], decodes=[4], counts={4: -1})
    driver.step(decodes=[3, 2, 4], counts={3: 2, 4: 2})
    driver.check_rows()
    driver.step(decodes=[3, 2, 4])
    driver.open(5, 3, prompts[1])
    driver.step(decodes=[3, 2, 4, 5], counts=dict.fromkeys([3, 2, 4, 5], 4))
    driver.check_rows()

    for one, prompt in {**prompts, 5: prompts[1]}.items():
        if one != 1:
            got = driver.tokens[one]
            assert got == alone(model, prompt, len(got))


def test_draft_rows_become_fewer_and_longer(
    make_model: Make, make_draft: Callable[[str], LoadedDrafter]
) -> None:
    """In one plan most leave, the one that has just verified moves, and a longer text comes in."""
    model = make_model("llama")
    prompts = {one: make_prompt(40 + one, 5 + one) for one in (1, 2, 3, 4)}
    prompts[5] = make_prompt(45, 60)
    driver = DraftDriver(model, make_draft("llama"), 4, 40)
    for one in (1, 2, 3, 4):
        driver.open(one, one - 1, prompts[one])
    driver.step(decodes=[1, 2, 3, 4], counts={1: 2, 3: 6})
    driver.row_count, driver.row_tokens = 2, 128
    driver.step(dropped=[1, 2, 4], moves=[(3, 0)], settle=[3], decodes=[3], counts={})
    driver.open(5, 1, prompts[5])
    for counts in ({3: 4, 5: 4}, {3: 1, 5: -1}, {3: 2, 5: 3}):
        driver.step(decodes=[3, 5], counts=counts)
        driver.check_rows()

    for one in (3, 5):
        got = driver.tokens[one]
        assert got == alone(model, prompts[one], len(got))


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_a_model_that_drafts_for_itself_is_always_right(
    make_model: Make, family: str, sampling: Sampling
) -> None:
    """Drafts are drawn with the keys, settings, penalties and bias of the position that verifies
    them: where both models are the same, every draft is accepted."""
    model = make_model(family)
    driver = DraftDriver(model, draft_model(model), row_count=3)
    prompts = {one: make_prompt(20 + one, 4 + 5 * one) for one in (1, 2, 3)}
    for one, prompt in prompts.items():
        driver.open(one, one - 1, prompt, sampling)
    for counts in ({1: 3, 2: 1, 3: 5}, {1: 16, 3: 2}, {1: -1, 2: 4, 3: 4}, {1: 2, 2: 2, 3: -1}):
        driver.step(decodes=[1, 2, 3], counts=counts)

    assert driver.agreed == driver.proposed == 39


@pytest.mark.parametrize("vocab", [192, 256])
def test_a_draft_model_may_pad_its_vocabulary_otherwise(make_model: Make, vocab: int) -> None:
    """More or fewer tokens than the model knows: what it does not know it reads as another, and
    never proposes what the model cannot say."""
    model = make_model("qwen3")
    small: Any = models.MAKERS["llama"]()
    weight = small.model.embed_tokens.weight
    small.model.embed_tokens.weight = mx.concatenate([weight, weight])[:vocab]
    small.lm_head.weight = mx.concatenate([small.lm_head.weight] * 2)[:vocab]
    # Likeliest by far, and beyond what the model knows.
    small.lm_head.weight[211:] = small.lm_head.weight[211:] * 9.0
    prompt = [*make_prompt(5, 9), 210, 205]
    sampling = Sampling(seed=7, temperature=1.0)
    driver = DraftDriver(model, draft_model(small), row_count=1)
    driver.open(1, 0, prompt, sampling)
    drafts: list[int] = []
    for _ in range(8):
        launched = driver.launch(decodes=[1], counts={1: 4})
        driver.finish(launched)
        assert launched.sample is not None
        drafts += launched.sample.drafts.read_ids()

    got = driver.tokens[1]
    assert got == alone(model, prompt, len(got), sampling)
    assert max(drafts) < min(vocab, 211)


def test_rows_begun_from_blocks_are_proposed_for(
    make_model: Make, make_draft: Callable[[str], LoadedDrafter]
) -> None:
    """A prefix that is reused has no draft row yet: a draft model reads it, a head does without;
    blocks hold the model's KV alone, and a sequence that comes back begins anew."""
    model = make_model("qwen3")
    driver = DraftDriver(model, make_draft("qwen3"), 2, block_tokens=8)
    prompt = make_prompt(41, 30)
    driver.begin(1, 0, prompt)
    driver.step(decodes=[1], counts={1: 5})
    driver.step(dropped=[1], settle=[])
    again = [*prompt, *driver.tokens[1]]
    assert driver.begin(2, 1, again) >= 24
    for count in (3, 0, 4, 2):
        driver.step(decodes=[2], counts={2: count})
        driver.check_rows()

    got = [*driver.tokens[1], *driver.tokens[2]]
    assert got == alone(model, prompt, len(got))


def test_receipts_cover_what_was_proposed(make_model: Make) -> None:
    """Two ranks whose proposals differ have different receipts, even where neither's are accepted
    and the text is the same."""
    model = make_model("qwen3")
    digests = []
    for seed in (3, 3, 4):
        driver = DraftDriver(model, eagle(seed=seed), row_count=1)
        driver.open(1, 0, make_prompt(3, 12))
        driver.step(decodes=[1], counts={1: 4})
        assert driver.agreed == 0
        digests.append(driver.digests[-1])

    assert digests[0] == digests[1] != digests[2]


def test_warming_up_proposes_and_leaves_nothing(
    make_model: Make, make_draft: Callable[[str], LoadedDrafter]
) -> None:
    """The first proposal of a rank is not the first of its kind; rows and receipts are fresh."""
    model = make_model("qwen3")
    warm, fresh = (DraftDriver(model, make_draft("qwen3"), row_count=2) for _ in range(2))
    asked: list[list[int]] = []
    propose = warm.executor._proposer.propose

    def noted(sequences: Any, lengths: Any, counts: Any, forwards: Any) -> Any:
        asked.append(list(counts))
        return propose(sequences, lengths, counts, forwards)

    warm.executor._proposer.propose = noted  # type: ignore[method-assign]
    warm_up(warm.executor, 4_096, speculates=True)
    assert asked == [[4, 4], [5, 1]]
    for driver in (warm, fresh):
        driver.open(1, 0, make_prompt(3, 20))
        driver.step(decodes=[1], counts={1: 3})
        driver.check_rows()

    assert warm.tokens == fresh.tokens
    assert warm.digests == fresh.digests


@pytest.mark.parametrize("make", [draft_model, lambda _: eagle()], ids=["model", "head"])
def test_proposing_copies_no_rows(
    make_model: Make, make: Callable[[nn.Module], LoadedDrafter]
) -> None:
    """Proposing, following and cutting back write into the rows of the draft in place, also while
    the step before is still running."""
    model = make_model("qwen3")
    driver = DraftDriver(model, make(model), 6, 4_096, block_tokens=NO_BLOCKS)
    layers = 3 if driver.executor.needs_draft_chunks else 1
    layer_bytes = driver.executor.draft_bytes_per_token * 6 * 4_096 // layers
    everybody = list(range(6))
    for one in everybody:
        driver.open(one, one, make_prompt(one, 5 + one))

    def busy() -> None:
        ahead = driver.launch(decodes=everybody[:3], counts={0: 5, 2: 1})
        for _ in range(3):
            launched = driver.launch(decodes=everybody[3:], counts={4: 2, 5: 4})
            driver.finish(ahead)
            ahead = driver.launch(decodes=everybody[:3], counts={0: 5, 2: 1})
            driver.finish(launched)
        driver.finish(ahead)

    busy()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    busy()

    assert mx.get_peak_memory() - before < layer_bytes / 2
