"""Random plans with drafts of ranks, compared with the tokens that each sequence gets alone."""

from typing import Any

import pytest
from mlx import nn

from tests.mlx import models
from tests.mlx.drafting.drafter_driver import (
    DrafterDriver,
    draft_model_of,
    perturb_weights,
    random_eagle_head,
)
from tests.mlx.executor_driver import make_executor
from tests.mlx.models import MakeModel
from tests.mlx.speculation.test_speculation_plans import (
    PLANS,
    ROWS,
    RandomScheduler,
    run_built_ahead,
)
from tests.support.effort import cases


class RandomDraftingScheduler(RandomScheduler):
    """Lets the ranks propose in most plans; the other plans hold drafts or none."""

    def __init__(
        self, model: nn.Module, seed: int, forward_cost_tokens: int, **changes: Any
    ) -> None:
        super().__init__(model, seed, forward_cost_tokens)
        self.driver: DrafterDriver = DrafterDriver(
            model, row_count=ROWS, row_tokens=96, forward_cost_tokens=forward_cost_tokens, **changes
        )

    def run_plan(self) -> None:
        """Make and launch one plan, then finish the one before it."""
        super().run_plan()
        self.driver.check_rows()

    def _draft(self, fields: dict[str, Any]) -> None:
        if self.random.random() < 0.25:
            super()._draft(fields)
            return
        choices = [-1, 0, 0, 1, 2, 5, 16]
        fields["counts"] = {one: self.random.choice(choices) for one in fields["decodes"]}


@pytest.mark.deep
@pytest.mark.parametrize("forward_cost_tokens", [1, pytest.param(64, marks=pytest.mark.proof)])
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
@pytest.mark.parametrize(("seed", "family"), [(5, "qwen3"), (6, "deepseek_v3")])
def test_random_plans_with_drafters_change_no_tokens(
    make_model: MakeModel, seed: int, family: str, method: str, forward_cost_tokens: int
) -> None:
    """Random plans with drafts of ranks and of plans change no token.

    Draft rows have the lengths that the plans give them. A rank that finishes each step before the
    next one, or builds the next one early, has the same receipts.
    """
    model = make_model(family)
    draft = random_eagle_head()
    if method == "draft_model":
        draft = draft_model_of(perturb_weights(models.MODEL_FACTORIES[family](), model, 0.05))
    scheduler = RandomDraftingScheduler(
        model, 10 * seed + forward_cost_tokens, forward_cost_tokens, draft=draft
    )
    for _ in range(PLANS):
        scheduler.run_plan()
    scheduler.finish_all()
    in_step = make_executor(model, forward_cost_tokens=forward_cost_tokens, drafter=draft)
    digests = [in_step.finish(in_step.launch(plan)).digest for plan in scheduler.plans]
    ahead = make_executor(model, forward_cost_tokens=forward_cost_tokens, drafter=draft)

    assert digests == scheduler.driver.digests
    assert digests == run_built_ahead(ahead, scheduler.plans)
    assert scheduler.checked > cases(25, 150)
    assert scheduler.driver.proposed_drafts > cases(15, 100)
    assert scheduler.driver.accepted_drafts > (cases(4, 30) if method == "draft_model" else -1)
