"""How often a proposed token is the one that is sampled, by how long the match before it is.

Each draft that comes true makes the match longer by one, so the rate by match length is also the
rate by position, and one small table per sequence serves all positions. A sequence begins with what
all sequences have shown, and soon goes by its own text.
"""

from shared import limits

_BOUNDS = (3, 4, 6, 10, 18)
"""Matches below 3 tokens, of 3, of 4 and 5 ... and from 18 on share a rate."""
CLASSES = len(_BOUNDS) + 1
_LONGEST = _BOUNDS[-1]
_CLASS_OF = tuple(sum(matched >= bound for bound in _BOUNDS) for matched in range(_LONGEST + 1))
"""Class by match length; what is longer has the last one's."""
_RUNS = tuple(
    tuple(_CLASS_OF[min(matched + place, _LONGEST)] for place in range(2 * limits.DRAFT_TOKENS_MAX))
    for matched in range(_LONGEST + 1)
)
"""By match length, the classes of the drafts that follow."""

_FIRST_RATES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.85)
"""Taken until something was measured."""
_COMMON_WEIGHT = 0.01
"""All sequences together: about the last hundred of a class count."""
_OWN_DECAY = 0.94
"""One sequence: about the last sixteen of a class count ..."""
_PRIOR_TRIALS = 3.0
"""... against so many of the common rate."""
_RATE_MAX = 0.98
_CHANCE_MIN = 0.005
"""Less does not count."""


def class_of(matched: int) -> int:
    """Return the class of a match of so many tokens."""
    return _CLASS_OF[min(matched, _LONGEST)]


class AcceptanceRates:
    """AcceptanceRates of all sequences together, by class."""

    def __init__(self) -> None:
        self.by_class = list(_FIRST_RATES)

    def note(self, kind: int, *, hit: bool) -> None:
        """Take in one token of one sequence."""
        self.by_class[kind] += _COMMON_WEIGHT * (hit - self.by_class[kind])


class Acceptance:
    """AcceptanceRates of one sequence."""

    __slots__ = ("_common", "_hits", "_trials", "rates")

    def __init__(self, common: AcceptanceRates) -> None:
        """Begin with the rates of all sequences, which this one's tokens teach too."""
        self._common = common
        self._hits = [0.0] * CLASSES
        self._trials = [0.0] * CLASSES
        self.rates = [min(_RATE_MAX, rate) for rate in common.by_class]
        """By class: the expected share of drafts that come true."""

    def note(self, matched: int, hit: bool) -> None:
        """Take in whether the token came that followed a match of so many tokens."""
        kind = class_of(matched)
        self._common.note(kind, hit=hit)
        hits = self._hits[kind] = _OWN_DECAY * self._hits[kind] + hit
        trials = self._trials[kind] = _OWN_DECAY * self._trials[kind] + 1.0
        common = self._common.by_class[kind]
        rate = (_PRIOR_TRIALS * common + hits) / (_PRIOR_TRIALS + trials)
        self.rates[kind] = min(_RATE_MAX, rate)

    def add_gains(self, gains: list[float], matched: int, lag: int) -> None:
        """Add to `gains[j]` the chance that the first j + 1 drafts all come true.

        Args:
            gains: as many as drafts may be sent; summed over sequences by the caller.
            matched: tokens matched, as known now.
            lag: tokens that are sampled before these drafts and not known yet: the match holds
                for them too, or there is nothing to gain.
        """
        run = _RUNS[min(matched, _LONGEST)]
        chance, rates = 1.0, self.rates
        for kind in run[:lag]:
            chance *= rates[kind]
        for position, kind in enumerate(run[lag : lag + len(gains)]):
            chance *= rates[kind]
            if chance < _CHANCE_MIN:
                return
            gains[position] += chance
