"""Estimates of the offset between two clocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.telemetry.clock_offsets import ClockOffsets

_DELAYS = st.floats(1e-5, 0.1)
_ROUND_TRIPS = st.lists(st.tuples(_DELAYS, _DELAYS, st.floats(0.0, 1.0)), min_size=1, max_size=20)


@given(offset_s=st.floats(-1e6, 1e6), reports=st.lists(_ROUND_TRIPS, min_size=1, max_size=20))
def test_true_offset_lies_within_error_of_estimate_for_any_delays(
    offset_s: float, reports: list[list[tuple[float, float, float]]]
) -> None:
    """Ways there and back may take different times, and the rank may answer late."""
    offsets, now_s = ClockOffsets(), 50.0
    for report in reports:
        round_trips = []
        for there_s, back_s, works_s in report:
            came_s = now_s + there_s
            answered_s = came_s + works_s
            round_trips.append(
                (now_s, came_s + offset_s, answered_s + offset_s, answered_s + back_s)
            )
            now_s = answered_s + back_s
        offsets.add_report(1, round_trips)
    found = offsets.find(1)
    assert found is not None
    assert abs(found.offset_s - offset_s) <= found.error_s + 1e-6
    last = min((there_s + back_s) / 2 for report in reports[-8:] for there_s, back_s, _ in report)
    assert found.error_s == pytest.approx(last, abs=1e-6)


def test_offset_is_unknown_before_first_report() -> None:
    """Nothing is guessed."""
    offsets = ClockOffsets()
    offsets.add_report(0, [])
    assert offsets.find(0) is None


def test_estimate_follows_clock_that_was_set() -> None:
    """Round trips of the past are forgotten, even if they were faster."""
    offsets = ClockOffsets()
    offsets.add_report(0, [(0.0, 5.0, 5.0, 0.0)])
    for _ in range(8):
        offsets.add_report(0, [(1.0, 9.1, 9.1, 1.2)])
    found = offsets.find(0)
    assert found is not None
    assert found.offset_s == pytest.approx(8.0)
