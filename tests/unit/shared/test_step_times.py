"""Packed times of steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages.telemetry.step_times import STEP_BYTES, StepTimes, pack, unpack

_TIMES = st.builds(StepTimes, *[st.floats(-2_000.0, 2_000.0)] * 6)


@given(st.lists(_TIMES, max_size=5), st.floats(0.0, 1e8))
def test_unpacked_times_differ_from_packed_ones_by_less_than_two_microseconds(
    steps: list[StepTimes], origin_s: float
) -> None:
    """Times count from the origin, so a machine that has run for years loses no precision."""
    moved = [StepTimes(*(origin_s + time_s for time_s in step)) for step in steps]
    packed = pack(moved, origin_s)
    assert len(packed) == STEP_BYTES * len(steps)
    for found, sent in zip(unpack(packed, origin_s), moved, strict=True):
        assert found == pytest.approx(sent, abs=2e-6, rel=0)


def test_time_too_far_from_origin_becomes_last_one_that_fits() -> None:
    """A step may not be lost, and its receipt may come after an hour."""
    packed = pack([StepTimes(0.0, 0.0, 0.0, 0.0, 1e5, -1e5)], 0.0)
    (found,) = unpack(packed, 0.0)
    assert found.ended_s == pytest.approx(2_147.483_647)
    assert found.reported_s == pytest.approx(-2_147.483_647)


def test_bytes_of_part_of_step_are_refused() -> None:
    """A damaged report ends with a sentence and not with wrong times."""
    with pytest.raises(ValueError, match="24 bytes"):
        list(unpack(bytes(STEP_BYTES + 1), 0.0))
