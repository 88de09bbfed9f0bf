"""Packed times of steps. Owns their form in messages: six int32 per step, in microseconds."""

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_STEP = struct.Struct("<6i")
STEP_BYTES = _STEP.size
_ENDED = struct.Struct("<i")
_ENDED_AT = 4 * _ENDED.size
"""Place of `StepTimes.ended_s` in a step."""
_MICROSECONDS_MAX = 2**31 - 1


class StepTimes(NamedTuple):
    """When the parts of one step happened on one rank, in seconds of any clock."""

    came_s: float
    """The plan arrived."""
    built_s: float
    """The graph was built; prefill chunks were started too."""
    handed_over_s: float
    """All its work was handed to the device."""
    began_s: float
    """The device could begin: its earlier work had ended, or this work was handed over."""
    ended_s: float
    """The device had ended, and the tokens were read."""
    reported_s: float
    """The receipt was about to be sent."""


class PackedTimes(NamedTuple):
    """The times of one step among those of a report, unpacked when they are needed."""

    packed: bytes
    """Times of several steps, as `pack` has returned them."""
    place: int
    """Number of the step among these."""
    origin_s: float
    """From which their microseconds count, by the reader's clock."""

    def unpack(self) -> StepTimes:
        """Return the times by the reader's clock."""
        found = _STEP.unpack_from(self.packed, self.place * STEP_BYTES)
        return StepTimes(*(self.origin_s + one / 1e6 for one in found))

    @property
    def ended_s(self) -> float:
        """`StepTimes.ended_s` by the reader's clock."""
        (microseconds,) = _ENDED.unpack_from(self.packed, self.place * STEP_BYTES + _ENDED_AT)
        return self.origin_s + float(microseconds) / 1e6


def pack(steps: Iterable[StepTimes], origin_s: float) -> bytes:
    """Return the times of steps as bytes.

    Args:
        steps: in the order of their ids.
        origin_s: the time, by the same clock, from which the microseconds count. Times more than 35
            minutes from it become the last one that fits.
    """
    return b"".join(_pack_step(times, origin_s) for times in steps)


def unpack(packed: bytes, origin_s: float) -> Iterator[StepTimes]:
    """Yield the times of steps.

    Args:
        packed: what `pack` has returned.
        origin_s: as there; or another, which moves all times.

    Raises:
        ValueError: when the bytes are not a whole number of steps.
    """
    for microseconds in microseconds_of(packed):
        yield StepTimes(*(origin_s + one / 1e6 for one in microseconds))


def microseconds_of(packed: bytes) -> Iterator[tuple[int, ...]]:
    """Yield the times of steps in microseconds after the origin, in the order of `StepTimes`.

    Raises:
        ValueError: when the bytes are not a whole number of steps.
    """
    if len(packed) % STEP_BYTES:
        raise ValueError(f"Times of a step have {STEP_BYTES} bytes")
    return _STEP.iter_unpack(packed)


def _pack_step(times: StepTimes, origin_s: float) -> bytes:
    try:
        return _STEP.pack(*[round((time_s - origin_s) * 1e6) for time_s in times])
    except struct.error:
        # Only those that do not fit are compared with the limits, which takes longer.
        return _STEP.pack(*[_bounded(time_s - origin_s) for time_s in times])


def _bounded(seconds: float) -> int:
    return round(max(-_MICROSECONDS_MAX, min(_MICROSECONDS_MAX, seconds * 1e6)))
