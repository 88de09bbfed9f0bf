"""Acceptance of drafts, and the state of a row until a plan says how many are accepted.

At each of a row's k + 1 positions the step samples the token that it would sample without drafts; a
draft is accepted while it equals that token. For drafts without a distribution of their own this
accepts as often as rejection sampling, and the text does not depend on the drafts. Source: Daliri,
Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding" (2025).
"""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx


@dataclasses.dataclass(slots=True)
class DraftVerification:
    """Drafts of one sequence in a launched step, until a later plan says how many are accepted.

    Until then the row holds all drafts. `accepted` is known when the step is finished. The executor
    does not act on it: the ranks apply the next plan at different times relative to that, so only a
    plan may say how many are accepted.
    """

    base_length: int
    """Number of tokens in the row before this step."""
    draft_count: int
    """Number of drafts, k."""
    sampled_ids: mx.array
    """Token ids sampled by that step for all rows, int32 [R]."""
    first_index: int
    """Index in `sampled_ids` of the token at the place of the first draft; k more follow."""
    accepted: int | None = None
    """Drafts accepted, once the step is finished; only used to refuse a plan that claims more."""

    @property
    def description(self) -> str:
        """Numbers of drafts, of tokens before them and of accepted drafts, for an error message."""
        return (
            f"{self.draft_count} drafts after {self.base_length} tokens, {self.accepted} accepted"
        )

    def allows(self, accepted: int) -> bool:
        """Tell whether a plan may accept this number of drafts: no more than the step accepted.

        While the step is not finished, all of its drafts may be accepted.

        Args:
            accepted: number of accepted drafts, according to the plan.
        """
        most = self.draft_count if self.accepted is None else self.accepted
        return 0 <= accepted <= most


def count_accepted(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many drafts, from the first on, equal the tokens sampled at their places.

    Args:
        drafts: k token ids.
        tokens: the k + 1 sampled token ids, in order.
    """
    for place, draft in enumerate(drafts):
        if draft != tokens[place]:
            return place
    return len(drafts)
