"""Counts of durations in ranges, as Prometheus' histograms have them."""

from typing import Annotated, Literal

from msgspec import Meta

from shared.messages.base import Count, MessagePart, Seconds, ShortText

DurationName = Literal["step", "queue", "prefill", "decode"]
"""`step`: a step on the primary rank. The others are of a request: its wait for the first slot, the
time from its last admission to its first token, and from that to its end."""

_STEP_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5, 0.75, 1.0, 2.0, 5.0,
)  # fmt: skip
_REQUEST_S = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
    320.0, 640.0,
)  # fmt: skip
BOUNDS_S: dict[DurationName, tuple[float, ...]] = {
    "step": _STEP_S,
    "queue": _REQUEST_S,
    "prefill": _REQUEST_S,
    "decode": _REQUEST_S,
}
"""Ascending upper bounds of the ranges; the last range has none."""


class DurationCounts(MessagePart, frozen=True, kw_only=True):
    """Durations of one name and label since the scheduler's start."""

    name: DurationName
    """Kind of duration."""
    label: ShortText = ""
    """Kind of step; "" for requests."""
    counts: Annotated[list[Count], Meta(max_length=32)]
    """Number of durations in each range; one more than there are bounds."""
    sum_s: Seconds
    """Sum of all durations."""
