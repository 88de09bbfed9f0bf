"""Checks of traces in Chrome's format, for tests."""

from collections import defaultdict
from typing import Any

Event = dict[str, Any]

_KEYS = {
    "M": {"pid", "name", "args"},
    "X": {"pid", "tid", "name", "cat", "ts", "dur", "args"},
    "s": {"pid", "tid", "name", "cat", "ts", "id"},
    "f": {"pid", "tid", "name", "cat", "ts", "id", "bp"},
}
_ROUNDING_US = 0.002


def check_form(events: list[Event]) -> None:
    """Assert that each event has the keys of its phase, and that its numbers are valid."""
    for event in events:
        assert event["ph"] in _KEYS, event
        assert _KEYS[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int)
        for key in ("ts", "dur"):
            assert event.get(key, 0.0) >= 0.0, event


def check_nesting(events: list[Event]) -> None:
    """Assert that two slices of one track follow each other or lie within each other."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            tracks[track].append((event["ts"], event["ts"] + event["dur"]))
    for track, slices in tracks.items():
        # Stable: of slices that begin together the outer one was written first.
        around: list[tuple[float, float]] = []
        for began, ended in sorted(slices, key=lambda one: one[0]):
            while around and around[-1][1] <= began + _ROUNDING_US:
                around.pop()
            if around:
                assert ended <= around[-1][1] + _ROUNDING_US, (track, around[-1], (began, ended))
            around.append((began, ended))


def check_arrows(events: list[Event]) -> dict[str, int]:
    """Assert that both ends of each arrow lie within slices; return the number of each kind."""
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    counts: dict[str, int] = defaultdict(int)
    for number, end in ends.items():
        assert begins[number]["ts"] <= end["ts"]
        for one in (begins[number], end):
            slices = tracks[one["pid"], one["tid"]]
            within = (each["ts"] <= one["ts"] <= each["ts"] + each["dur"] for each in slices)
            assert any(within), one
        counts[end["name"]] += 1
    return counts
