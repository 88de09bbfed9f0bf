"""Plans whose drafts or roll-backs contradict the rows; the executor refuses them."""

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from shared.errors import InvariantBroken
from shared.messages import KeptBlock, PrefillChunk, RolledBack
from tests.mlx.executor_driver import ExecutorDriver, admission, make_executor, make_prompt
from tests.mlx.models import PLAIN_FAMILIES, STATEFUL_FAMILIES, MakeModel, WrappedModel

PROMPT = make_prompt(1, 10)
DRAFTS = [3, 4, 5]
HASH = bytes(32)


def _roll_back(length: int, sequence_id: int = 1) -> dict[str, Any]:
    return {"rolled_back": [RolledBack(sequence_id=sequence_id, length=length)]}


def _driver_with_unverified_drafts(model: nn.Module) -> ExecutorDriver:
    """Return a driver whose sequence 1 has three unverified drafts after ten tokens; 2 has none."""
    driver = ExecutorDriver(model, row_count=3, row_tokens=15)
    driver.start(1, 0, PROMPT)
    driver.start(2, 1, PROMPT)
    driver.step(decodes=[1, 2], drafts=[DRAFTS, []])
    return driver


INVALID_PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "decoded": ({"decodes": [1]}, "before a plan says how many"),
    "decoded with drafts": ({"decodes": [1], "drafts": [[1]]}, "before a plan says how many"),
    "prefilled": (
        {"prefill_chunks": [PrefillChunk(sequence_id=1, start=9, length=1, samples=True)]},
        "before a plan says how many",
    ),
    "set aside": ({"checkpoints": [1]}, "before a plan says how many"),
    "a draft is kept": (
        {"keep_blocks": [KeptBlock(sequence_id=1, start=8, length=4, hash=HASH)]},
        "are unverified drafts",
    ),
    "cut too short": (_roll_back(10), "cannot be cut to 10 tokens: 3 drafts after 10 tokens"),
    "cut beyond what was accepted": (_roll_back(12), "0 accepted"),
    "cut beyond the row": (_roll_back(15), "cannot be cut to 15 tokens"),
    "cut without drafts": (_roll_back(11, 2), "has no unverified drafts"),
    "cut of nobody": (_roll_back(11, 9), "not in the batch"),
    "cut twice": (
        {"rolled_back": [RolledBack(sequence_id=1, length=11)] * 2},
        "has no unverified drafts",
    ),
    "more lists than decodes": ({"decodes": [2], "drafts": [[1], []]}, "2 lists of drafts for 1"),
    "fewer lists than decodes": ({**_roll_back(11), "decodes": [1, 2], "drafts": [[1]]}, "1 lists"),
    "drafts without decodes": ({"drafts": [[1]]}, "1 lists of drafts for 0"),
    "draft beyond the vocabulary": ({"decodes": [2], "drafts": [[1, 211]]}, "draft 211"),
    "no room": ({"decodes": [2], "drafts": [[1] * 4]}, "have room for them in 15"),
    "no room for another's drafts": (
        {**_roll_back(11), "decodes": [1, 2], "drafts": [[1] * 4, []]},
        "do not all have room",
    ),
    "too small": ({"row_tokens": 13}, "do not fit"),
}


@pytest.mark.parametrize(("fields", "message"), INVALID_PLANS.values(), ids=INVALID_PLANS)
def test_plan_contradicting_unverified_drafts_raises_invariant_broken(
    make_model: MakeModel, fields: dict[str, Any], message: str
) -> None:
    """A plan that uses, keeps or wrongly cuts rows with unverified drafts raises
    InvariantBroken.
    """
    driver = _driver_with_unverified_drafts(make_model("qwen3"))
    fields = dict(fields)
    driver.row_tokens = fields.pop("row_tokens", driver.row_tokens)

    with pytest.raises(InvariantBroken, match=message):
        driver.launch(**fields)


def test_valid_variants_of_refused_draft_plans_are_executed(make_model: MakeModel) -> None:
    """The same state accepts the valid variants of the refused plans."""
    model = make_model("qwen3")
    kept = KeptBlock(sequence_id=1, start=8, length=3, hash=HASH)
    _driver_with_unverified_drafts(model).step(keep_blocks=[kept], decodes=[2], drafts=[[1] * 3])
    _driver_with_unverified_drafts(model).step(
        **_roll_back(11), keep_blocks=[kept], decodes=[1, 2], drafts=[[1] * 3, []]
    )
    _driver_with_unverified_drafts(model).step(dropped=[1], admitted=[admission(3, 0, PROMPT)])
    driver = _driver_with_unverified_drafts(model)
    driver.row_tokens = 14
    driver.step()


def test_roll_back_in_plan_launched_before_step_finished_gives_same_tokens(
    make_model: MakeModel,
) -> None:
    """A rank that has not finished a step yet applies its roll-back with the same tokens and
    digests.
    """
    driver = ExecutorDriver(make_model("qwen3"), row_count=1, row_tokens=32)
    ahead = ExecutorDriver(make_model("qwen3"), row_count=1, row_tokens=32)
    for one in (driver, ahead):
        one.start(1, 0, PROMPT)
    truth = ExecutorDriver(make_model("qwen3"), row_count=1, row_tokens=32)
    truth.start(1, 0, PROMPT)
    for _ in range(4):
        truth.step(decodes=[1])
    drafts = [*truth.tokens[1][1:3], 0]
    launched = ahead.launch(decodes=[1], drafts=[drafts])
    following = ahead.launch(**_roll_back(13), decodes=[1])
    ahead.finish(launched)
    ahead.finish(following)
    driver.step(decodes=[1], drafts=[drafts])
    driver.step(**_roll_back(13), decodes=[1])

    assert driver.tokens[1] == ahead.tokens[1] == truth.tokens[1][:5]
    assert driver.digests == ahead.digests


@pytest.mark.parametrize("family", [*STATEFUL_FAMILIES, "deepseek_v32"])
def test_drafts_for_models_without_roll_back_are_refused(
    make_model: MakeModel, family: str
) -> None:
    """Families with windows or recurrent state refuse drafts; empty lists of drafts are allowed."""
    driver = ExecutorDriver(make_model(family))
    driver.start(1, 0, PROMPT)
    driver.step(decodes=[1], drafts=[[]])

    assert not driver.executor.store.can_roll_back
    with pytest.raises(InvariantBroken, match="cannot be rolled back"):
        driver.launch(decodes=[1], drafts=[[1]])


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_models_with_plain_or_latent_attention_support_roll_back(
    make_model: MakeModel, family: str
) -> None:
    """Rows of plain keys and values, also of latent attention, can be rolled back."""
    assert make_executor(make_model(family)).store.can_roll_back


def test_model_failing_on_several_tokens_per_row_serves_without_drafts(
    make_model: MakeModel,
) -> None:
    """A model that fails on several tokens per row of a batch is served without drafts."""

    class SingleTokenModel(WrappedModel):
        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            if tokens.shape[0] > 1 and tokens.shape[1] > 1:
                raise ValueError
            return super().__call__(tokens, cache)

    driver = ExecutorDriver(SingleTokenModel(make_model("llama")))
    driver.start(1, 0, PROMPT)
    driver.step(decodes=[1])

    assert not driver.executor.store.can_roll_back
