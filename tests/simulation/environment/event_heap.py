"""Event heap and clock of a simulated run: nothing happens except events from this heap.

Random choices come from named streams, so one more draw in one stream changes no other stream.
"""

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any

START_S = 1_000.0
"""First second of the clock; several components treat times near 0 as "never"."""


class Violation(AssertionError):
    """A checked promise is broken; the text names the promise and the facts."""


class EventHeap:
    """Events ordered by time; events of the same time run in the order in which they were added."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_s = START_S
        self.log: list[tuple[object, ...]] = []
        """(second, process, event, details...), all plain values."""
        self._entries: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def now(self) -> float:
        """Return the simulated time in seconds, the clock of every process."""
        return self.now_s

    def call_at(self, when_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Schedule a call at `when_s`, which is not in the past."""
        assert when_s >= self.now_s
        self._count += 1
        heapq.heappush(self._entries, (when_s, self._count, callback, args))

    def call_after(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        """Schedule a call `seconds` from now."""
        self.call_at(self.now_s + seconds, callback, *args)

    def step(self) -> bool:
        """Run the next event; return False when the heap is empty."""
        if not self._entries:
            return False
        self.now_s, _, callback, args = heapq.heappop(self._entries)
        callback(*args)
        return True

    def record(self, process: str, event: str, *details: object) -> None:
        """Append a line to the run's log."""
        self.log.append((self.now_s, process, event, *details))

    def digest(self) -> str:
        """Return a hash of the log: equal only for runs that did the same at the same times."""
        return hashlib.blake2b(repr(self.log).encode(), digest_size=16).hexdigest()

    def random_stream(self, name: str) -> random.Random:
        """Return the random stream of this name; it depends on the seed and the name alone."""
        return random.Random(f"{self.seed}/{name}")
