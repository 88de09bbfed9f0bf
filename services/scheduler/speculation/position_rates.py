"""Acceptance rates of drafts proposed by ranks. Owns how often one is accepted, by position.

A rate is that of a draft whose predecessors were all accepted. A sequence starts with the rates of
all sequences, scaled at all positions by how its own drafts compare; soon each position relies on
its own counts.
"""

from shared import limits

_CLASS_OF = (0, 1, 2, 3, 4, 4, *[5] * (limits.DRAFT_TOKENS_MAX - 6))
"""Class by position; late positions are rarely reached and share a rate."""
CLASSES = _CLASS_OF[-1] + 1

_FIRST_RATE = 0.7
"""Assumed rate, until measured."""
_FIRST_TRIALS = 8.0
"""Weight of the assumed rate, in trials."""
_COMMON_WEIGHT = 0.01
"""Smallest weight of one draft in the common rate, so at least the last hundred count."""
_OWN_DECAY = 0.94
"""Decay of a sequence's own counts, so about the last sixteen drafts of a class count."""
_PRIOR_TRIALS = 3.0
"""Weight of the common rate in a sequence's rate, in trials."""
_FADED = 0.5
_RATE_MAX = 0.98
_CHANCE_MIN = 0.005
"""Smaller chances are ignored."""


class PositionRates:
    """Acceptance rates of drafts over all sequences, by class of their position in the row.

    Each of the first four positions is a class, the next two share one, and all later ones share
    the last.
    """

    def __init__(self) -> None:
        self.by_class = [_FIRST_RATE] * CLASSES
        self._trials = [_FIRST_TRIALS] * CLASSES

    @property
    def drafts_tried(self) -> float:
        """Number of verified drafts at the first position, plus the trials assumed at the start."""
        return self._trials[0]

    def record(self, kind: int, *, hit: bool) -> None:
        """Record whether one draft was accepted.

        Args:
            kind: class of the draft's position, 0 to CLASSES - 1.
            hit: it was accepted.
        """
        self._trials[kind] += 1.0
        weight = max(_COMMON_WEIGHT, 1.0 / self._trials[kind])
        self.by_class[kind] += weight * (hit - self.by_class[kind])


class PositionAcceptance:
    """Acceptance rates of one sequence's drafts, by class of their position in the row."""

    __slots__ = ("_common_rates", "_hits", "_trials", "rates")

    def __init__(self, common: PositionRates) -> None:
        """Start with the common rates, which this sequence's drafts update too."""
        self._common_rates = common
        self._hits = [0.0] * CLASSES
        self._trials = [0.0] * CLASSES
        self.rates = [min(_RATE_MAX, rate) for rate in common.by_class]
        """Expected acceptance rate by class."""

    def record_verification(self, proposed: int, accepted: int) -> None:
        """Record one verification; drafts after the first rejected one do not count.

        Args:
            proposed: drafts in the row.
            accepted: how many of them, from the first, were accepted.
        """
        for position in range(min(proposed, accepted + 1)):
            kind, hit = _CLASS_OF[position], position < accepted
            self._common_rates.record(kind, hit=hit)
            self._hits[kind] = _OWN_DECAY * self._hits[kind] + hit
            self._trials[kind] = _OWN_DECAY * self._trials[kind] + 1.0
        self._update()

    def fade(self) -> None:
        """Halve the weight of this sequence's counts, since its text may have changed."""
        self._hits = [_FADED * hits for hits in self._hits]
        self._trials = [_FADED * trials for trials in self._trials]
        self._update()

    def _update(self) -> None:
        common = self._common_rates.by_class
        expected = sum(map(float.__mul__, self._trials, common))
        scale = (sum(self._hits) + _PRIOR_TRIALS) / (expected + _PRIOR_TRIALS)
        self.rates = [
            min(_RATE_MAX, (_PRIOR_TRIALS * min(1.0, scale * rate) + hits) / (_PRIOR_TRIALS + own))
            for rate, hits, own in zip(common, self._hits, self._trials, strict=True)
        ]

    def add_chances(self, gains: list[float], _matched: int, _tokens_in_flight: int) -> None:
        """Add to `gains[j]` the chance that the first j + 1 drafts are all accepted.

        Args:
            gains: one entry per possible draft; changed in place.
            _matched: not used.
            _tokens_in_flight: not used, because ranks propose from the tokens on the device.
        """
        chance, rates = 1.0, self.rates
        for position in range(len(gains)):
            chance *= rates[_CLASS_OF[position]]
            if chance < _CHANCE_MIN:
                return
            gains[position] += chance


class OptimisticChances:
    """Chances assumed for a probe: each draft is accepted with probability RATE."""

    RATE = 0.85

    def add_chances(self, gains: list[float], _matched: int, _tokens_in_flight: int) -> None:
        """Add to `gains[j]` the assumed chance that the first j + 1 drafts are all accepted.

        Args:
            gains: one entry per possible draft; changed in place.
            _matched: not used.
            _tokens_in_flight: not used.
        """
        for position in range(len(gains)):
            gains[position] += self.RATE ** (position + 1)
