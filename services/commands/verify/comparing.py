"""Whether two greedy completions of one prompt are the same, or differ only where rounding may.

The same computation gives the same bits. One that runs in a batch of another shape may round
otherwise in the last bits, so two tokens that are almost equally likely may change places; what
follows then is another text, and says nothing. Any other difference is a fault.
"""

from msgspec import Struct

from services.commands.verify.gateway import HttpAnswer

NEAR_TIE_NATS = 0.5
"""A bfloat16 logit between 16 and 32 is a multiple of 0.125, and several layers round."""


class Divergence(Struct, frozen=True, kw_only=True):
    """The first place at which two completions differ."""

    place: int
    """Index of the token."""
    gap: float | None
    """By how much the first completion's token was likelier there than the second's, in nats; None
    when the second's was not among the likeliest."""

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding alone explains it."""
        return self.gap is not None and self.gap <= NEAR_TIE_NATS

    @property
    def text(self) -> str:
        """A few words."""
        if self.gap is None:
            return f"token {self.place + 1} is none of the 5 likeliest"
        return f"token {self.place + 1} was {self.gap:.2f} nats less likely"


def divergence(first: HttpAnswer, second: HttpAnswer) -> Divergence | None:
    """Return where the second completion leaves the first; None when they are equal."""
    if (first.tokens, first.text, first.finish_reason) == (
        second.tokens,
        second.text,
        second.finish_reason,
    ):
        return None
    pairs = zip(first.tokens, second.tokens, strict=False)
    common = min(len(first.tokens), len(second.tokens))
    place = next((index for index, (one, other) in enumerate(pairs) if one != other), common)
    if place < common:
        known = first.likeliest[place] if place < len(first.likeliest) else {}
        own, other = known.get(first.tokens[place]), known.get(second.tokens[place])
        gap = abs(own - other) if own is not None and other is not None else None
        return Divergence(place=place, gap=gap)
    # One has ended where the other goes on: how close its two likeliest tokens were is the most
    # that can be known, because the token that ends a text has none.
    longer = max(first, second, key=lambda one: len(one.tokens))
    values = sorted(longer.likeliest[place].values()) if place < len(longer.likeliest) else []
    return Divergence(place=place, gap=values[-1] - values[-2] if len(values) > 1 else None)
