"""Plays the scheduler with drafts: names what was accepted as soon as it may, or when told to."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlx import nn

from services.rank_worker.execution.executor import LaunchedStep, StepResult
from shared.messages import RolledBack, Sampling, StepPlan
from tests.mlx.blocks.block_driver import BLOCK_TOKENS, BlockDriver
from tests.mlx.executor_driver import GREEDY, executor_of

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
            self.executor = executor_of(model, take_restored=self._take, **changes)
        self.verifying: set[int] = set()
        """Sequences whose drafts no plan has settled."""
        self.accepted: dict[int, int] = {}
        """By sequence: drafts accepted, of those that are verifying and finished."""

    def plan(self, **fields: Any) -> StepPlan:
        """Return the next plan.

        Args:
            fields: `drafts` by sequence, for those of the decodes that get any; `settle`, sequences
                to roll back, by default all whose step is finished; and the plan's own.
        """
        drafts: Mapping[int, Sequence[int]] = fields.pop("drafts", {})
        settle = fields.pop("settle", sorted(self.accepted))
        rolled_back = []
        for one in settle:
            # The row has its last token's KV since the step itself, the accepted ones' from here.
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
        """Finish a step; of what was accepted, take note."""
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

    def open(
        self, sequence_id: int, slot: int, tokens: list[int], sampling: Sampling = GREEDY
    ) -> None:
        """Admit and prefill a sequence as a whole."""
        self.start(sequence_id, slot, tokens, sampling)


def drafts_of(
    expected: Sequence[int], done: int, count: int, right: int, vocab_size: int = 211
) -> list[int]:
    """Return `count` drafts behind `done` tokens: the first `right` as expected, then a wrong one.

    Args:
        expected: all tokens of the sequence.
        done: how many of them it has.
        count: drafts.
        right: how many of them agree.
        vocab_size: draft ids are below.
    """
    coming = list(expected[done : done + count])
    coming += [0] * (count - len(coming))
    if right < count:
        coming[right] = (coming[right] + 1) % vocab_size
    return coming
