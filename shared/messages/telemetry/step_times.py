"""Packed times of steps. Owns their form in messages: six int32 per step, in microseconds."""

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_STEP = struct.Struct("<6i")
STEP_BYTES = _STEP.size
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


def pack(steps: Iterable[StepTimes], origin_s: float) -> bytes:
    """Return the times of steps as bytes.

    Args:
        steps: in the order of their ids.
        origin_s: the time, by the same clock, from which the microseconds count. Times more than 35
            minutes from it become the last one that fits.
    """
    return b"".join(
        _STEP.pack(*(_microseconds(time_s - origin_s) for time_s in times)) for times in steps
    )


def unpack(packed: bytes, origin_s: float) -> Iterator[StepTimes]:
    """Yield the times of steps.

    Args:
        packed: what `pack` has returned.
        origin_s: as there; or another, which moves all times.

    Raises:
        ValueError: when the bytes are not a whole number of steps.
    """
    if len(packed) % STEP_BYTES:
        raise ValueError(f"Times of a step have {STEP_BYTES} bytes")
    for microseconds in _STEP.iter_unpack(packed):
        yield StepTimes(*(origin_s + one / 1e6 for one in microseconds))


def _microseconds(seconds: float) -> int:
    return round(max(-_MICROSECONDS_MAX, min(_MICROSECONDS_MAX, seconds * 1e6)))
