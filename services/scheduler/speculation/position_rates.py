"""How often a draft of the ranks' own model or head is the token that is drawn, by its position.

Such drafts exist always, so nothing but their own fate speaks for them. A rate is that of a draft
whose predecessors all came true. A sequence begins with what all sequences have shown; how much
better or worse its own drafts fare counts at all positions, and soon each position goes by itself.
"""

from shared import limits

_CLASS_OF = (0, 1, 2, 3, 4, 4, *[5] * (limits.DRAFT_TOKENS_MAX - 6))
"""Class by position; far ones are seldom reached and share a rate."""
CLASSES = _CLASS_OF[-1] + 1

_FIRST_RATE = 0.7
"""Taken until something was measured ..."""
_FIRST_TRIALS = 8.0
"""... as if it had been, so often."""
_COMMON_WEIGHT = 0.01
"""All sequences together: about the last hundred of a class count, once there are so many."""
_OWN_DECAY = 0.94
"""One sequence: about the last sixteen of a class count ..."""
_PRIOR_TRIALS = 3.0
"""... against so many of what is common."""
_FADED = 0.5
_RATE_MAX = 0.98
_CHANCE_MIN = 0.005
"""Less does not count."""


class PositionRates:
    """Rates of all sequences together, by class."""

    def __init__(self) -> None:
        self.by_class = [_FIRST_RATE] * CLASSES
        self._trials = [_FIRST_TRIALS] * CLASSES

    @property
    def tried(self) -> float:
        """Drafts of the first position so far, those that were thought up counted in."""
        return self._trials[0]

    def note(self, kind: int, *, hit: bool) -> None:
        """Take in the fate of one draft."""
        self._trials[kind] += 1.0
        weight = max(_COMMON_WEIGHT, 1.0 / self._trials[kind])
        self.by_class[kind] += weight * (hit - self.by_class[kind])


class PositionAcceptance:
    """Rates of one sequence."""

    __slots__ = ("_common", "_hits", "_trials", "rates")

    def __init__(self, common: PositionRates) -> None:
        """Begin with the rates of all sequences, which this one's drafts teach too."""
        self._common = common
        self._hits = [0.0] * CLASSES
        self._trials = [0.0] * CLASSES
        self.rates = [min(_RATE_MAX, rate) for rate in common.by_class]
        """By class: the expected share of drafts that come true."""

    def verified(self, proposed: int, accepted: int) -> None:
        """Take in one verification: what comes behind the first rejected draft shows nothing."""
        for position in range(min(proposed, accepted + 1)):
            kind, hit = _CLASS_OF[position], position < accepted
            self._common.note(kind, hit=hit)
            self._hits[kind] = _OWN_DECAY * self._hits[kind] + hit
            self._trials[kind] = _OWN_DECAY * self._trials[kind] + 1.0
        self._update()

    def fade(self) -> None:
        """Believe less in what was seen long ago: the text may be another now."""
        self._hits = [_FADED * hits for hits in self._hits]
        self._trials = [_FADED * trials for trials in self._trials]
        self._update()

    def _update(self) -> None:
        common = self._common.by_class
        expected = sum(map(float.__mul__, self._trials, common))
        fares = (sum(self._hits) + _PRIOR_TRIALS) / (expected + _PRIOR_TRIALS)
        self.rates = [
            min(_RATE_MAX, (_PRIOR_TRIALS * min(1.0, fares * rate) + hits) / (_PRIOR_TRIALS + own))
            for rate, hits, own in zip(common, self._hits, self._trials, strict=True)
        ]

    def add_gains(self, gains: list[float], matched: int, lag: int) -> None:  # noqa: ARG002
        """Add to `gains[j]` the chance that the first j + 1 drafts all come true.

        Args:
            gains: as many as drafts may be proposed; summed over sequences by the caller.
            matched: of no meaning here.
            lag: of none either: the ranks propose from the tokens on the device.
        """
        chance, rates = 1.0, self.rates
        for position in range(len(gains)):
            chance *= rates[_CLASS_OF[position]]
            if chance < _CHANCE_MIN:
                return
            gains[position] += chance


class HopedFor:
    """What a probe hopes for: the rates at which it would be worth to know better."""

    RATE = 0.85

    def add_gains(self, gains: list[float], matched: int, lag: int) -> None:  # noqa: ARG002
        """Add the chances; see `PositionAcceptance.add_gains`."""
        for position in range(len(gains)):
            gains[position] += self.RATE ** (position + 1)
