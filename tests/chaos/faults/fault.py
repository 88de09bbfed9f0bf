"""Faults: how each is injected, into which kind of stack, and its limits for the streams."""

import dataclasses
import random
import time
from collections.abc import Callable, Collection

from shared.messages import StatusReported
from tests.chaos.cluster import processes
from tests.chaos.cluster.stack import Stack
from tests.chaos.cluster.stack_kinds import StackKind
from tests.chaos.load.client_load import Load, Phase

RECOVERY_GRACE_S = 3.0
"""Seconds that a pause may exceed the time for loading."""
SEAMLESS_GRACE_S = 1.0
"""Seconds that a fault without a pause may add to the longest pause without faults."""
PROGRESS_DEADLINE_S = 60.0
PROBLEMS_KEPT = 8


@dataclasses.dataclass(slots=True)
class FaultContext:
    """A running stack, its load, and the results of the fault that is being injected."""

    stack: Stack
    load: Load
    rng: random.Random
    slack_s: float = 0.0
    """Seconds added to deadlines on a machine that is busy with other work."""
    repetition: int = 0
    """Number of earlier faults of this kind."""
    problems: list[str] = dataclasses.field(default_factory=list)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    """Largest value of each further measurement, by name with unit."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the world."""
        return self.stack.options.ranks

    @property
    def target_rank(self) -> str:
        """Role of the rank to hit; each repetition hits the next one."""
        return f"rank {self.repetition % self.world_size}"

    def record_figure(self, name: str, value: float) -> None:
        """Record a measurement; the largest one of each name is kept."""
        self.figures[name] = max(value, self.figures.get(name, 0.0))

    def add_problem(self, problem: str) -> None:
        """Record a failed expectation; only the first few are kept."""
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(problem)

    def wait_until_served(
        self, gone: Collection[int] = (), deadline_s: float = 60.0
    ) -> StatusReported:
        """Wait for a ready world without the processes `gone` and for tokens on every stream.

        Raises:
            DeadlineExceeded: the world is not ready or a stream has no token in time.
        """
        status = self.stack.wait_until_ready(gone, deadline_s)
        self.load.wait_for_tokens(time.monotonic(), PROGRESS_DEADLINE_S)
        return status

    def expect_gone(self, pids: Collection[int], deadline_s: float, name: str) -> None:
        """Wait for the end of processes; record the time, and a problem if one still runs."""
        began_s = time.monotonic()
        deadline_s += self.slack_s
        left = processes.wait_gone(pids, deadline_s)
        self.record_figure(f"{name} gone s", time.monotonic() - began_s)
        if left:
            self.add_problem(f"{name}: processes {left} still run after {deadline_s:.0f} s")

    def expect_same_world(self, before: StatusReported, after: StatusReported) -> None:
        """Record a problem if the epoch or a rank process has changed."""
        old, new = ([rank.pid for rank in status.ranks] for status in (before, after))
        if before.epoch != after.epoch or old != new:
            self.add_problem(
                f"the world ended: epoch {before.epoch} -> {after.epoch}, processes {old} -> {new}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault."""

    name: str
    expected: str
    """The expected effect, for the table."""
    inject: Callable[[FaultContext], None]
    """Inject the fault once and return when the stack has recovered."""
    phase: Phase = "decode"
    stack_kind: StackKind = "supervised"
    loads: int = 1
    """How often the load time and its grace fit into the allowed pause; 0: no pause allowed."""
    extra_s: float = 0.0
    """Seconds added to the allowed pause: the fault's own duration or a deadline."""
    may_lose: bool = False
    """Whether the fault may end streams."""
    may_refuse: bool = False
    """Whether new requests may get an error during the fault."""
    ranks_min: int = 1
    """The fewest ranks with which the fault is possible."""

    def pause_max_s(self, load_s: float, baseline_s: float, slack_s: float) -> float:
        """Return the longest allowed pause in seconds.

        Args:
            load_s: duration of loading in this run.
            baseline_s: longest pause of the same streams without a fault.
            slack_s: added for a slow machine to each load; a fault without a load gets none.
        """
        if self.loads:
            return self.loads * (load_s + RECOVERY_GRACE_S + slack_s) + self.extra_s
        return baseline_s + SEAMLESS_GRACE_S + self.extra_s
