"""Acceptance rates of n-gram drafts. Owns how often a draft is accepted, by match length.

Each accepted draft makes the match longer by one token, so one table by match length serves all
draft positions. A sequence starts with the rates of all sequences and soon relies on its own.
"""

from shared import limits

_BOUNDS = (3, 4, 6, 10, 18)
"""Lower bounds of the classes of match lengths: below 3 tokens, 3, 4 to 5, ..., 18 and more."""
CLASSES = len(_BOUNDS) + 1
_LONGEST = _BOUNDS[-1]
_CLASS_OF = tuple(sum(matched >= bound for bound in _BOUNDS) for matched in range(_LONGEST + 1))
"""Class by match length, up to the longest."""
_RUNS = tuple(
    tuple(_CLASS_OF[min(matched + place, _LONGEST)] for place in range(2 * limits.DRAFT_TOKENS_MAX))
    for matched in range(_LONGEST + 1)
)
"""By match length: the classes of the drafts that follow."""

_FIRST_RATES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.85)
"""Assumed rates by class, until measured."""
_COMMON_WEIGHT = 0.01
"""Weight of one token in the rate of all sequences, so about the last hundred count."""
_OWN_DECAY = 0.94
"""Decay of a sequence's own counts, so about the last sixteen tokens of a class count."""
_PRIOR_TRIALS = 3.0
"""Weight of the common rate in a sequence's rate, in trials."""
_RATE_MAX = 0.98
_CHANCE_MIN = 0.005
"""Smaller chances are ignored."""


def class_of(matched: int) -> int:
    """Return the class of a match length: 0 below 3 tokens, up to CLASSES - 1 from 18 tokens.

    Args:
        matched: length of the match in tokens.
    """
    return _CLASS_OF[min(matched, _LONGEST)]


class AcceptanceRates:
    """Acceptance rates of n-gram drafts over all sequences, by class of match length.

    A match is a run of tokens at the end of a text that occurs earlier in it too. The token that
    followed there is the predicted one, and a draft.
    """

    def __init__(self) -> None:
        self.by_class = list(_FIRST_RATES)

    def record(self, kind: int, *, hit: bool) -> None:
        """Record whether a sampled token was the one that a match had predicted.

        Args:
            kind: class of the match's length, as returned by `class_of`.
            hit: the sampled token was the predicted one.
        """
        self.by_class[kind] += _COMMON_WEIGHT * (hit - self.by_class[kind])


class SequenceAcceptance:
    """Acceptance rates of one sequence's n-gram drafts, by class of match length.

    They start as the rates of all sequences and follow its own last tokens.
    """

    __slots__ = ("_common_rates", "_hits", "_trials", "rates")

    def __init__(self, common: AcceptanceRates) -> None:
        """Start with the common rates, which this sequence's tokens update too."""
        self._common_rates = common
        self._hits = [0.0] * CLASSES
        self._trials = [0.0] * CLASSES
        self.rates = [min(_RATE_MAX, rate) for rate in common.by_class]
        """Expected acceptance rate by class."""

    def record(self, matched: int, hit: bool) -> None:
        """Record whether a sampled token was the one that a match had predicted.

        Args:
            matched: length of the match in tokens.
            hit: the sampled token was the predicted one.
        """
        kind = class_of(matched)
        self._common_rates.record(kind, hit=hit)
        hits = self._hits[kind] = _OWN_DECAY * self._hits[kind] + hit
        trials = self._trials[kind] = _OWN_DECAY * self._trials[kind] + 1.0
        common = self._common_rates.by_class[kind]
        rate = (_PRIOR_TRIALS * common + hits) / (_PRIOR_TRIALS + trials)
        self.rates[kind] = min(_RATE_MAX, rate)

    def add_chances(self, gains: list[float], matched: int, tokens_in_flight: int) -> None:
        """Add to `gains[j]` the chance that the first j + 1 drafts are all accepted.

        Args:
            gains: one entry per possible draft; changed in place.
            matched: how many tokens at the end of the known text equal those before the place from
                which drafts are copied.
            tokens_in_flight: tokens sampled before these drafts that are not known yet; the match
                must hold for them too.
        """
        run = _RUNS[min(matched, _LONGEST)]
        chance, rates = 1.0, self.rates
        for kind in run[:tokens_in_flight]:
            chance *= rates[kind]
        for position, kind in enumerate(run[tokens_in_flight : tokens_in_flight + len(gains)]):
            chance *= rates[kind]
            if chance < _CHANCE_MIN:
                return
            gains[position] += chance
