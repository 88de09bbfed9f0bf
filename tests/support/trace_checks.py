"""Checks of traces in Chrome's format, for tests.

They follow Perfetto's reader of this format (`json_trace_parser`, `slice_tracker` and
`flow_tracker` of its trace processor), which draws no slice and no arrow that breaks its rules.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]

_KEYS = {
    "M": {"pid", "name", "args"},
    "X": {"pid", "tid", "name", "cat", "ts", "dur", "args"},
    "s": {"pid", "tid", "name", "cat", "ts", "id"},
    "f": {"pid", "tid", "name", "cat", "ts", "id", "bp"},
}


def check_form(events: list[Event]) -> None:
    """Assert that each event has the keys of its phase, and that its numbers are valid."""
    for event in events:
        assert event["ph"] in _KEYS, event
        assert _KEYS[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int)
        for key in ("ts", "dur"):
            assert event.get(key, 0.0) >= 0.0, event


def check_nesting(events: list[Event]) -> None:
    """Assert that Perfetto would draw every slice: none ends later than one around it."""
    for event, around in _read(events):
        if event["ph"] == "X" and around:
            outer = around[-1]
            assert _end_ns(event) <= _end_ns(outer), (outer, event)


def check_arrows(events: list[Event]) -> dict[str, int]:
    """Assert that both ends of each arrow lie within slices; return the number of each kind."""
    begins: dict[int, Event] = {}
    counts: dict[str, int] = defaultdict(int)
    for event, around in _read(events):
        if event["ph"] not in ("s", "f"):
            continue
        # Perfetto binds an arrow to the slice that began last, whether it is over or not.
        assert around, event
        assert _ns(event["ts"]) <= _end_ns(around[-1]), (around[-1], event)
        if event["ph"] == "s":
            assert event["id"] not in begins
            begins[event["id"]] = event
        else:
            assert begins.pop(event["id"])["name"] == event["name"]
            counts[event["name"]] += 1
    assert begins == {}
    return counts


def _read(events: list[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Yield the events as Perfetto reads them, each with the slices around it, outermost first.

    It sorts events by time, and those of one time by their order in the file. A slice that has
    ended is forgotten when the next one begins on its track.
    """
    tracks: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in sorted((one for one in events if one["ph"] != "M"), key=lambda one: one["ts"]):
        around = tracks[event["pid"], event["tid"]]
        if event["ph"] != "X":
            yield event, around
            continue
        while around and _has_ended(around[-1], event):
            around.pop()
        yield event, around
        around.append(event)


def _has_ended(one: Event, later: Event) -> bool:
    end_ns, began_ns = _end_ns(one), _ns(later["ts"])
    return end_ns < began_ns or (end_ns == began_ns and (one["dur"] > 0 or later["dur"] > 0))


def _end_ns(event: Event) -> int:
    return _ns(event["ts"]) + _ns(event["dur"])


def _ns(microseconds: float) -> int:
    """Return nanoseconds as Perfetto does: cut off, begin and duration each for itself."""
    return int(microseconds * 1_000.0)
