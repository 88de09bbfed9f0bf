"""One heap of events and the only clock: in a simulated run nothing happens but from here.

All chance comes from streams that are named, so that one draw more in one place moves no other.
"""

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any

START_S = 1_000.0
"""The clock's first second; far from 0, which several parts take for "never"."""


class Violation(AssertionError):
    """A promise is broken. Its text is the promise and the facts."""


class Heap:
    """Events in order of time; those of one moment in the order in which they were planned."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_s = START_S
        self.log: list[tuple[object, ...]] = []
        """(second, process, what, details...), all plain values."""
        self._entries: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def now(self) -> float:
        """Return the simulated second: this is every process' clock."""
        return self.now_s

    def at(self, when_s: float, do: Callable[..., object], *args: Any) -> None:
        """Let something happen at a second, which is not before now."""
        assert when_s >= self.now_s
        self._count += 1
        heapq.heappush(self._entries, (when_s, self._count, do, args))

    def after(self, seconds: float, do: Callable[..., object], *args: Any) -> None:
        """Let something happen so many seconds from now."""
        self.at(self.now_s + seconds, do, *args)

    def step(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._entries:
            return False
        self.now_s, _, do, args = heapq.heappop(self._entries)
        do(*args)
        return True

    def note(self, who: str, what: str, *details: object) -> None:
        """Write a line of the run's log."""
        self.log.append((self.now_s, who, what, *details))

    def digest(self) -> str:
        """Return what two runs have in common only if they did the same at the same time."""
        return hashlib.blake2b(repr(self.log).encode(), digest_size=16).hexdigest()

    def chance(self, name: str) -> random.Random:
        """Return the stream of chance of this name: equal for equal seeds."""
        return random.Random(f"{self.seed}/{name}")
