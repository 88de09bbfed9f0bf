"""Comparison of two greedy completions of one prompt. Owns the limit for rounding.

The same computation gives the same bits. A batch of another shape may round the last bits
differently, so two tokens of almost equal probability may change places, and the rest of the text
then differs without meaning. Every other difference is a fault.
"""

import operator

from msgspec import Struct

from services.commands.verify.gateway import HttpAnswer

NEAR_TIE_NATS = 0.5
"""A bfloat16 logit between 16 and 32 is a multiple of 0.125, and several layers round."""

_COMPARED = operator.attrgetter("tokens", "text", "finish_reason")


class Divergence(Struct, frozen=True, kw_only=True):
    """First token in which two completions of one prompt differ."""

    place: int
    """Index of the token in the completion, from 0."""
    gap: float | None
    """Difference of the log probabilities of the two tokens there, in nats; None if the second
    token is not among the likeliest."""

    @property
    def is_near_tie(self) -> bool:
        """Whether both tokens were almost equally likely, so that rounding can explain it.

        True when their log probabilities differ by at most NEAR_TIE_NATS.
        """
        return self.gap is not None and self.gap <= NEAR_TIE_NATS

    @property
    def text(self) -> str:
        """Sentence that says which token differs first, counted from 1, and how unlikely it was.

        The gap is how many nats less likely the second completion's token was than the first's.
        """
        if self.gap is None:
            return f"token {self.place + 1} is not among the 5 likeliest"
        return f"token {self.place + 1} was {self.gap:.2f} nats less likely"


def divergence(first: HttpAnswer, second: HttpAnswer) -> Divergence | None:
    """Return the first token in which two completions differ; None if they are equal.

    They are equal if tokens, text and finish_reason are equal. If one completion ends where the
    other continues, the result's `gap` is estimated from the two likeliest tokens at that place.

    Args:
        first: answer to the prompt, whose log probabilities give the gap.
        second: another answer to it.
    """
    if _COMPARED(first) == _COMPARED(second):
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
