"""Random plans of all that proposals allow, run ahead and in step, against what each gets alone."""

from collections.abc import Callable
from typing import Any

import pytest
from mlx import nn

from tests.effort import cases
from tests.mlx import models
from tests.mlx.drafting.drafter_driver import DraftDriver, draft_model, eagle, perturbed
from tests.mlx.executor_driver import executor_of
from tests.mlx.speculation.test_speculation_plans import PLANS, ROWS, Player, built_ahead

Make = Callable[[str], nn.Module]


class DraftPlayer(Player):
    """Has the ranks propose in most plans; others hold drafts, or none."""

    def __init__(
        self, model: nn.Module, seed: int, forward_cost_tokens: int, **changes: Any
    ) -> None:
        super().__init__(model, seed, forward_cost_tokens)
        self.driver: DraftDriver = DraftDriver(
            model, row_count=ROWS, row_tokens=96, forward_cost_tokens=forward_cost_tokens, **changes
        )

    def play(self) -> None:
        """Make and launch one plan, then finish the one before it."""
        super().play()
        self.driver.check_rows()

    def _draft(self, fields: dict[str, Any]) -> None:
        if self.random.random() < 0.25:
            super()._draft(fields)
            return
        choices = [-1, 0, 0, 1, 2, 5, 16]
        fields["counts"] = {one: self.random.choice(choices) for one in fields["decodes"]}


@pytest.mark.deep
@pytest.mark.parametrize("forward_cost_tokens", [1, 64])
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
@pytest.mark.parametrize(("seed", "family"), [(5, "qwen3"), (6, "deepseek_v3")])
def test_random_plans_run_ahead_give_each_sequence_its_own_tokens(
    make_model: Make, seed: int, family: str, method: str, forward_cost_tokens: int
) -> None:
    """Joining, leaving, moving, resizing, cutting sooner or later, with any numbers of drafts of
    ranks and of plans: no token differs, and draft rows hold what plans say. A rank that finishes
    each step before the next, or only builds ahead, has the same receipts."""
    model = make_model(family)
    draft = eagle()
    if method == "draft_model":
        draft = draft_model(perturbed(models.MAKERS[family](), model, 0.05))
    player = DraftPlayer(model, 10 * seed + forward_cost_tokens, forward_cost_tokens, draft=draft)
    for _ in range(PLANS):
        player.play()
    player.end()
    in_step = executor_of(model, forward_cost_tokens=forward_cost_tokens, drafter=draft)
    digests = [in_step.finish(in_step.launch(plan)).digest for plan in player.plans]
    ahead = executor_of(model, forward_cost_tokens=forward_cost_tokens, drafter=draft)

    assert digests == player.driver.digests
    assert digests == built_ahead(ahead, player.plans)
    assert player.checked > cases(25, 150)
    assert player.driver.proposed > cases(15, 100)
    assert player.driver.agreed > (cases(4, 30) if method == "draft_model" else -1)
