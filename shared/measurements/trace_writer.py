"""Events of a trace in the format of Chrome's and Perfetto's viewers. Owns that format. Pure.

Source of the format: "Trace Event Format", by the Chromium project. A viewer needs slices of one
track that nest or follow each other, and arrows both of whose ends lie within slices. Perfetto
drops a slice that ends later than one that has begun before it; of slices that begin together, the
outer one must be added first. It cuts begin and duration off at nanoseconds, each for itself, so
all times are whole microseconds, which stay as they are.
"""

import dataclasses
import heapq
from typing import Any

Event = dict[str, Any]
Facts = dict[str, str | int | float]

_SHORTEST_US = 1
"""A viewer ignores arrows to slices without duration."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """A slice that was written, as an end of arrows. Times are microseconds in the trace."""

    track: tuple[int, int]
    """Numbers of process and thread."""
    began_us: int
    ended_us: int


class TraceWriter:
    """Collects the events of a trace. Times are seconds by the scheduler's clock."""

    def __init__(self, since_s: float) -> None:
        """Begin a trace without events.

        Args:
            since_s: its beginning; slices that began before are cut off there.
        """
        self._since_s = since_s
        self._events: list[Event] = []
        self._arrows: list[Event] = []

    def events(self) -> list[Event]:
        """Return all events; arrows come last, because their ends must be known before."""
        return [*self._events, *self._arrows]

    def add_process(self, process: int, name: str, order: int) -> None:
        """Add a group of tracks.

        Args:
            process: its number.
            name: its title.
            order: groups with lower numbers are shown further up.
        """
        common = {"ph": "M", "pid": process}
        self._events.append({**common, "name": "process_name", "args": {"name": name}})
        self._events.append({**common, "name": "process_sort_index", "args": {"sort_index": order}})

    def add_track(self, track: tuple[int, int], name: str) -> None:
        """Add a track with a title."""
        process, thread = track
        common = {"ph": "M", "pid": process, "tid": thread}
        self._events.append({**common, "name": "thread_name", "args": {"name": name}})
        self._events.append({**common, "name": "thread_sort_index", "args": {"sort_index": thread}})

    def add_slice(
        self,
        track: tuple[int, int],
        name: str,
        times_s: tuple[float, float],
        category: str,
        facts: Facts,
    ) -> Slice:
        """Add a slice, and return it.

        Args:
            track: its track.
            name: its title.
            times_s: its begin and end.
            category: its kind.
            facts: what a viewer shows of it.
        """
        began_us, ended_us = (self._us(one) for one in times_s)
        ended_us = max(ended_us, began_us)
        self._events.append(
            {
                "ph": "X",
                "pid": track[0],
                "tid": track[1],
                "name": name,
                "cat": category,
                "ts": began_us,
                "dur": ended_us - began_us,
                "args": facts,
            }
        )
        return Slice(track, began_us, ended_us)

    def add_arrow(self, name: str, begin: Slice | None, end: Slice | None) -> None:
        """Add an arrow between two slices, if both are known and no clock error turns it around."""
        if begin is None or end is None or end.ended_us - begin.began_us < _SHORTEST_US:
            return
        number = len(self._arrows) // 2 + 1
        for phase, one, at_us in (
            ("s", begin, begin.began_us),
            ("f", end, max(begin.began_us, end.began_us)),
        ):
            event: Event = {
                "ph": phase,
                "pid": one.track[0],
                "tid": one.track[1],
                "name": name,
                "cat": "arrow",
                "id": number,
                "ts": at_us,
            }
            # The slice around the end, not the next one.
            self._arrows.append({**event, "bp": "e"} if phase == "f" else event)

    def _us(self, time_s: float) -> int:
        return round(max(0.0, time_s - self._since_s) * 1e6)


class Lanes:
    """Tracks for slices that may overlap, as few as possible: each is on the first free one."""

    def __init__(self, writer: TraceWriter, process: int, first_thread: int, name: str) -> None:
        """Begin without tracks.

        Args:
            writer: gets the titles of the tracks.
            process: their process.
            first_thread: number of the first track; the others follow.
            name: title of the first; the others have a number too.
        """
        self._writer = writer
        self._process = process
        self._first_thread = first_thread
        self._name = name
        self._busy: list[tuple[float, int]] = []
        """End of the last slice of each occupied track, with the track's number."""
        self._free: list[int] = []
        self._count = 0

    def take(self, began_s: float, ended_s: float) -> tuple[int, int]:
        """Return the track for a slice; call it in the order of their begins."""
        while self._busy and self._busy[0][0] <= began_s:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if not self._free:
            heapq.heappush(self._free, self._count)
            self._count += 1
            title = self._name if self._count == 1 else f"{self._name} {self._count}"
            self._writer.add_track((self._process, self._first_thread + self._count - 1), title)
        lane = heapq.heappop(self._free)
        heapq.heappush(self._busy, (ended_s, lane))
        return self._process, self._first_thread + lane
