"""Comparison of two greedy completions of one prompt. Owns the limit for rounding.

The same computation gives the same bits. A batch of another shape may round the last bits
differently, so two tokens of almost equal probability may change places, and the rest of the text
then differs without meaning. Every other difference is a fault.
"""

from msgspec import Struct

from services.commands.verify.gateway import HttpAnswer

NEAR_TIE_NATS = 0.5
"""A bfloat16 logit between 16 and 32 is a multiple of 0.125, and several layers round."""


class Divergence(Struct, frozen=True, kw_only=True):
    """First token in which two completions of one prompt differ."""

    place: int
    """Index of the token in the completion, from 0."""
    gap: float | None
    """Difference of the log probabilities of the two tokens there, in nats; None if the second
    token is not among the likeliest."""

    @property
    def is_near_tie(self) -> bool:
        """Whether the gap is at most NEAR_TIE_NATS, so that rounding alone can explain it."""
        return self.gap is not None and self.gap <= NEAR_TIE_NATS

    @property
    def text(self) -> str:
        """The difference in words, with the number of the token from 1."""
        if self.gap is None:
            return f"token {self.place + 1} is not among the 5 likeliest"
        return f"token {self.place + 1} was {self.gap:.2f} nats less likely"


def divergence(first: HttpAnswer, second: HttpAnswer) -> Divergence | None:
    """Return the first token in which two completions differ; None if they are equal.

    Texts and reasons for the end are compared too. If one completion ends where the other
    continues, the gap is that of the two likeliest tokens there.
    """
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
    # One text ends where the other continues. The token that ends a text is not reported, so the
    # gap between the two likeliest reported tokens is the best estimate.
    longer = max(first, second, key=lambda one: len(one.tokens))
    values = sorted(longer.likeliest[place].values()) if place < len(longer.likeliest) else []
    return Divergence(place=place, gap=values[-1] - values[-2] if len(values) > 1 else None)
