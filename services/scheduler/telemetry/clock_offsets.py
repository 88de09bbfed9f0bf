"""Offsets between the clocks of ranks and scheduler. Owns the estimates; pure.

Source: the clock filter of NTP (RFC 5905, section 10). A plan and its receipt are one round
trip: the scheduler knows when it sent the plan and got the receipt, the rank when it got the plan
and sent the receipt. Of several round trips the shortest one says most, because all that delays one
direction makes the offset wrong by up to half of it.
"""

import dataclasses
from collections import defaultdict, deque

_REPORTS = 8
"""Reports of a rank, of about a second each, whose best round trips are compared. Clocks drift
by less than 0.1 ms meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClockOffset:
    """How a rank's clock differs from the scheduler's."""

    offset_s: float
    """The rank's time minus the scheduler's."""
    error_s: float
    """The true offset differs by this at most."""


class ClockOffsets:
    """Estimates, for each rank of an epoch, how its clock differs from the scheduler's."""

    def __init__(self) -> None:
        self._best: defaultdict[int, deque[ClockOffset]] = defaultdict(
            lambda: deque(maxlen=_REPORTS)
        )
        """The best round trip of each of the last reports, by rank."""

    def add_report(self, rank: int, round_trips: list[tuple[float, float, float, float]]) -> None:
        """Add the round trips of one report.

        Args:
            rank: the rank.
            round_trips: per step (plan sent, plan arrived, receipt sent, receipt arrived) in
                seconds; the first and last by the scheduler's clock, the others by the rank's.
        """
        best = min(round_trips, key=_way_s, default=None)
        if best is None:
            return
        sent_s, arrived_s, answered_s, received_s = best
        self._best[rank].append(
            ClockOffset(
                offset_s=((arrived_s - sent_s) + (answered_s - received_s)) / 2.0,
                error_s=max(0.0, _way_s(best)) / 2.0,
            )
        )

    def find(self, rank: int) -> ClockOffset | None:
        """Return the best estimate for a rank; None before its first report."""
        return min(self._best[rank], key=lambda one: one.error_s, default=None)


def _way_s(round_trip: tuple[float, float, float, float]) -> float:
    """Return how long the messages of a round trip were on their way, both together."""
    sent_s, arrived_s, answered_s, received_s = round_trip
    return (received_s - sent_s) - (answered_s - arrived_s)
