"""Simulated collectives of one world, with their failures.

A step ends on a rank only after every rank has entered it. When a rank's process dies, a collective
of its peers raises within milliseconds or never returns; both were measured on MLX's ring. A
stopped process delays its peers.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

from tests.simulation.environment.event_heap import EventHeap

RAISE_S = 0.002
"""After a peer's death a collective that raises does so within this time."""
RECHECK_S = 0.02


class Member(Protocol):
    """A rank process."""

    is_alive: bool
    is_stopped: bool

    def call_later(self, seconds: float, callback: Callable[..., object], *args: object) -> None:
        """Call a function of this process after `seconds`."""
        ...


@dataclasses.dataclass
class _Participant:
    """One rank inside a step."""

    member: Member
    seconds: float
    done: Callable[[], object]
    failed: Callable[[], object]


class Group:
    """The ranks of one world."""

    def __init__(self, name: str, size: int, heap: EventHeap) -> None:
        self._size = size
        self._heap = heap
        self._rng = heap.random_stream(f"group {name}")
        self._members: dict[int, Member] = {}
        self._inside: dict[int, dict[int, _Participant]] = {}
        """By step: the ranks that have entered it."""
        self._is_broken = False

    def enter(
        self,
        step: int,
        rank: int,
        member: Member,
        seconds: float,
        done: Callable[[], object],
        failed: Callable[[], object],
    ) -> None:
        """Enter the collectives of a step; step 0 is the rendezvous.

        Args:
            step: the step's number.
            rank: the rank that enters.
            member: its process.
            seconds: duration of the step on this rank after all ranks have entered.
            done: called when the step ends.
            failed: called if the collective raises; neither is called if it hangs.
        """
        self._members[rank] = member
        waiting = self._inside.setdefault(step, {})
        waiting[rank] = _Participant(member, seconds, done, failed)
        if self._is_broken:
            self._break(waiting[rank])
        elif len(waiting) == self._size:
            slowest_s = max(one.seconds for one in waiting.values())
            self._heap.call_after(slowest_s, self._complete, step)

    def leave(self, member: Member) -> None:
        """Break all collectives because a process has ended."""
        if member not in self._members.values():
            return
        self._is_broken = True
        for waiting in self._inside.values():
            for one in waiting.values():
                self._break(one)
        self._inside.clear()

    def _complete(self, step: int) -> None:
        waiting = self._inside.get(step)
        if waiting is None:
            return
        if any(one.member.is_stopped for one in waiting.values()):
            self._heap.call_after(RECHECK_S, self._complete, step)
            return
        del self._inside[step]
        for one in waiting.values():
            # The step ends at a slightly different time on each host.
            one.member.call_later(0.001 * self._rng.random(), one.done)

    def _break(self, one: _Participant) -> None:
        if self._rng.random() < 0.6:
            one.member.call_later(RAISE_S * self._rng.random(), one.failed)
