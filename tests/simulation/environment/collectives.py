"""The collectives of one world as they fail: who meets whom, who hangs, who raises.

A step ends on no rank before every rank is in it. When a rank's process is gone, what the others
are in raises within milliseconds, or never returns: both were measured on MLX's ring. A process
that is stopped holds up the others for as long.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

from tests.simulation.environment.event_heap import Heap

RAISE_S = 0.002
"""After a peer's death a collective that raises does so within this time."""
LOOK_AGAIN_S = 0.02


class Member(Protocol):
    """A rank process."""

    is_alive: bool
    is_stopped: bool

    def later(self, seconds: float, do: Callable[..., object], *args: object) -> None:
        """Let something happen in this process."""
        ...


@dataclasses.dataclass
class _Wait:
    """One rank inside a step."""

    member: Member
    seconds: float
    done: Callable[[], object]
    failed: Callable[[], object]


class Group:
    """The ranks of one world."""

    def __init__(self, name: str, size: int, heap: Heap) -> None:
        self._size = size
        self._heap = heap
        self._chance = heap.chance(f"group {name}")
        self._members: dict[int, Member] = {}
        self._inside: dict[int, dict[int, _Wait]] = {}
        """By step: who is in it."""
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
        """Come to a step's collectives; step 0 is the rendezvous.

        Args:
            step: which one.
            rank: who comes.
            member: its process.
            seconds: how long its part takes from when all are there.
            done: called when it is through.
            failed: called if its collective raises; neither is called if it hangs.
        """
        self._members[rank] = member
        waiting = self._inside.setdefault(step, {})
        waiting[rank] = _Wait(member, seconds, done, failed)
        if self._is_broken:
            self._break(waiting[rank])
        elif len(waiting) == self._size:
            slowest_s = max(one.seconds for one in waiting.values())
            self._heap.after(slowest_s, self._meet, step)

    def leave(self, member: Member) -> None:
        """A process is gone, and with it its connections to the others."""
        if member not in self._members.values():
            return
        self._is_broken = True
        for waiting in self._inside.values():
            for one in waiting.values():
                self._break(one)
        self._inside.clear()

    def _meet(self, step: int) -> None:
        waiting = self._inside.get(step)
        if waiting is None:
            return
        if any(one.member.is_stopped for one in waiting.values()):
            self._heap.after(LOOK_AGAIN_S, self._meet, step)
            return
        del self._inside[step]
        for one in waiting.values():
            # Each host sees the end at its own time.
            one.member.later(0.001 * self._chance.random(), one.done)

    def _break(self, one: _Wait) -> None:
        if self._chance.random() < 0.6:
            one.member.later(RAISE_S * self._chance.random(), one.failed)
