"""What a fault is: what is done, to which kind of Lockstep, and what may come of it at most."""

import dataclasses
import random
import time
from collections.abc import Callable, Collection
from typing import Literal

from shared.messages import StatusReported
from tests.chaos import processes
from tests.chaos.load import Load, Phase
from tests.chaos.stack import Stack

RECOVERY_GRACE_S = 3.0
"""A pause lasts at most the time that loading takes, and this."""
SEAMLESS_GRACE_S = 1.0
"""What nobody is to notice may add so much to the longest pause without faults."""
PROGRESS_DEADLINE_S = 60.0

Ground = Literal["up", "by parts"]
"""`lockstep up`, its cache on a small disk where this machine allows that; or every role started by
the harness, with proxies between them and ranks that can lie."""


@dataclasses.dataclass(slots=True)
class Arena:
    """A running Lockstep, its load, and what the fault that is done now has shown."""

    stack: Stack
    load: Load
    chance: random.Random
    slack_s: float = 0.0
    """What deadlines are put off by, because this machine does other things too."""
    turn: int = 0
    """How many faults of this kind were done before this one."""
    problems: list[str] = dataclasses.field(default_factory=list)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    """Largest values of what a fault measures beside pauses, by name with unit."""

    @property
    def ranks(self) -> int:
        """Ranks of the world."""
        return self.stack.shape.ranks

    def rank_in_turn(self) -> str:
        """Return the role of the rank whose turn it is, so that each is hit."""
        return f"rank {self.turn % self.ranks}"

    def note(self, name: str, value: float) -> None:
        """Keep the largest value of a figure."""
        self.figures[name] = max(value, self.figures.get(name, 0.0))

    def complain(self, problem: str) -> None:
        """Keep what went wrong; the first few say enough."""
        if len(self.problems) < 8:
            self.problems.append(problem)

    def wait_served(self, gone: Collection[int] = (), deadline_s: float = 60.0) -> StatusReported:
        """Wait until a world without the processes `gone` serves, and every stream goes on."""
        status = self.stack.wait_ready(gone, deadline_s)
        self.load.wait_progress(time.monotonic(), PROGRESS_DEADLINE_S)
        return status

    def expect_gone(self, pids: Collection[int], deadline_s: float, what: str) -> None:
        """Complain when a process still runs `deadline_s` later; note how long it took."""
        began_s = time.monotonic()
        deadline_s += self.slack_s
        left = processes.wait_gone(pids, deadline_s)
        self.note(f"{what} gone s", time.monotonic() - began_s)
        if left:
            self.complain(f"{what}: processes {left} still run after {deadline_s:.0f} s")

    def expect_same(self, before: StatusReported, after: StatusReported) -> None:
        """Complain when the world is not the one it was."""
        old, new = ([rank.pid for rank in status.ranks] for status in (before, after))
        if before.epoch != after.epoch or old != new:
            self.complain(
                f"the world was given up: epoch {before.epoch} -> {after.epoch}, "
                f"processes {old} -> {new}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault."""

    name: str
    expected: str
    """What must come of it, for the table."""
    act: Callable[[Arena], None]
    """Does it once, and returns when it is over."""
    phase: Phase = "decode"
    ground: Ground = "up"
    loads: int = 1
    """A pause may last so many times the load time and its grace; 0: nobody is to notice."""
    extra_s: float = 0.0
    """What the pause may last beyond that: the fault itself, or a deadline."""
    may_lose: bool = False
    """Streams die by its nature."""
    may_refuse: bool = False
    """New requests may be answered with an error while it lasts."""
    ranks_min: int = 1
    """With fewer ranks it cannot be done."""

    def pause_max_s(self, load_s: float, baseline_s: float, slack_s: float) -> float:
        """Return the longest pause allowed.

        Args:
            load_s: how long loading took in this run.
            baseline_s: longest pause of the same streams without a fault.
            slack_s: for a machine that may be slow to start and to load; what nobody is to notice
                waits for neither.
        """
        if self.loads:
            return self.loads * (load_s + RECOVERY_GRACE_S + slack_s) + self.extra_s
        return baseline_s + SEAMLESS_GRACE_S + self.extra_s
