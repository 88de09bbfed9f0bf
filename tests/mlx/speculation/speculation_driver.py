"""Scheduler stand-in with drafts: rolls rows back as soon as it can, or when told to."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlx import nn

from services.rank_worker.batch.step_outputs import LaunchedStep, StepResult
from shared.messages import RolledBack, StepPlan
from tests.mlx.blocks.block_driver import BLOCK_TOKENS, BlockDriver
from tests.mlx.executor_driver import make_executor

NO_BLOCKS = 100_000


class SpeculationDriver(BlockDriver):
    """Steps whose decodes may carry drafts: `step(drafts={sequence: drafts, ...})`."""

    def __init__(
        self,
        model: nn.Module,
        row_count: int = 4,
        row_tokens: int = 128,
        block_tokens: int = BLOCK_TOKENS,
        **changes: Any,
    ) -> None:
        super().__init__(model, row_count, row_tokens, block_tokens)
        if changes:
            self.executor = make_executor(model, take_restored=self._take_restored, **changes)
        self.verifying: set[int] = set()
        """Sequences with drafts whose rows no plan has rolled back yet."""
        self.accepted: dict[int, int] = {}
        """Number of accepted drafts, by sequence with a finished step that is not rolled back."""

    def plan(self, **fields: Any) -> StepPlan:
        """Return the next plan.

        Args:
            fields: `drafts` by sequence; `roll_back`, the sequences to roll back (by default all
                with a finished step); and fields of the plan.
        """
        drafts: Mapping[int, Sequence[int]] = fields.pop("drafts", {})
        roll_back = fields.pop("roll_back", sorted(self.accepted))
        rolled_back = []
        for one in roll_back:
            # The step counted its own token; the accepted drafts count from this plan on.
            accepted = self.accepted.pop(one)
            self.verifying.remove(one)
            self._advance(one, accepted)
            rolled_back.append(RolledBack(sequence_id=one, length=self.lengths[one]))
        for one in fields.get("dropped", []):
            self.verifying.discard(one)
            self.accepted.pop(one, None)
        decodes = fields.get("decodes", [])
        if drafts:
            fields["drafts"] = [list(drafts.get(one, [])) for one in decodes]
            self.verifying |= {one for one in decodes if drafts.get(one)}
        return super().plan(rolled_back=rolled_back, **fields)

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Finish a step and record the numbers of accepted drafts."""
        result = super().finish(launched)
        plan = launched.plan
        decoded = result.tokens[len(result.tokens) - len(plan.decodes) :]
        for one, tokens, drafts in zip(plan.decodes, decoded, plan.drafts, strict=False):
            self._check_run(tokens, drafts)
            if drafts and one in self.verifying:
                self.accepted[one] = len(tokens) - 1
        return result

    def _check_run(self, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        assert 1 <= len(tokens) <= len(drafts) + 1
        assert tokens[:-1] == drafts[: len(tokens) - 1]


def make_drafts(
    expected: Sequence[int], done: int, count: int, right: int, vocab_size: int = 211
) -> list[int]:
    """Return `count` drafts after `done` tokens: the first `right` as expected, then a wrong one.

    Args:
        expected: all tokens of the sequence.
        done: number of tokens that it has.
        count: number of drafts.
        right: number of drafts that agree.
        vocab_size: draft ids are below.
    """
    coming = list(expected[done : done + count])
    coming += [0] * (count - len(coming))
    if right < count:
        coming[right] = (coming[right] + 1) % vocab_size
    return coming
