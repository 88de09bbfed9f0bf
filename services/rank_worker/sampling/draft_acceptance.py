"""What of the drafts is accepted, and the state of a row until a plan says so.

At each of a row's k + 1 positions the token is drawn that would be drawn there without drafts; a
draft is accepted while it is that very token. For drafts without a distribution of their own this
accepts as often as rejection sampling can, and the text does not depend on the drafts. Source:
Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding"
(2025).
"""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx


@dataclasses.dataclass(slots=True)
class Verifying:
    """Drafts of one row whose verification is launched. Until a plan cuts the row, it counts all.

    How many are accepted is known here when the step is finished, but nothing follows from that: a
    plan is applied on some ranks before that, on others behind it.
    """

    base: int
    """Tokens in the row before."""
    count: int
    """Drafts behind them and the token before."""
    ids: mx.array
    """int32, drawn by that step."""
    first: int
    """Index in `ids` of what was drawn in place of the first draft; k more follow."""
    accepted: int | None = None
    """Known once the step is finished; only to refuse a plan that claims more."""

    @property
    def text(self) -> str:
        """What is verified, for an error's sentence."""
        return f"{self.count} drafts behind {self.base} tokens, accepted {self.accepted}"

    def accepts(self, count: int) -> bool:
        """Tell whether so many drafts can have been accepted. Fewer than were is no harm."""
        most = self.count if self.accepted is None else self.accepted
        return 0 <= count <= most


def count_accepted(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many drafts agree with what was drawn in their place.

    Args:
        drafts: k of them.
        tokens: the k + 1 tokens that were drawn, in order.
    """
    for place, draft in enumerate(drafts):
        if draft != tokens[place]:
            return place
    return len(drafts)
