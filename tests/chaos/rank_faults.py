"""Rank processes that die or stop, in every state of the world."""

import signal
import time

from tests.chaos import processes
from tests.chaos.fault import Arena, Fault
from tests.chaos.stack import Stuck

OTHERS_GONE_S = 2.0
"""The other ranks leave within a second of the epoch's end, which is seen within another."""
DEADLINE_MIN_S = 5.0
"""The least that a step is given; a step of the demo model is given no more."""
DISMISSED_GONE_S = 3.0
"""From the next world's readiness on: a stopped process was killed long before."""


def _kill(arena: Arena) -> None:
    before = {rank.pid for rank in arena.stack.status().ranks}
    pid = arena.stack.signal(arena.rank_in_turn(), signal.SIGKILL)
    arena.expect_gone(before - {pid}, OTHERS_GONE_S, "other ranks")
    arena.wait_served(before | {pid})


def _kill_idle(arena: Arena) -> None:
    arena.load.drain()
    pid = arena.stack.signal(arena.rank_in_turn(), signal.SIGKILL)
    arena.stack.wait_ready({pid})
    arena.load.begin("decode")
    arena.wait_served()


def _kill_while_loading(arena: Arena) -> None:
    """A world that nobody waits for loads, and loses a rank while it does."""
    arena.load.drain()
    first = arena.stack.signal(arena.rank_in_turn(), signal.SIGKILL)
    wait_loading(arena)
    time.sleep(arena.chance.uniform(0.0, 0.6 * arena.stack.load_s))
    role = f"rank {arena.chance.randrange(arena.ranks)}"
    second = arena.stack.signal(role, signal.SIGKILL)
    arena.stack.wait_ready({first, second})
    arena.load.begin("decode")
    arena.wait_served()


def wait_loading(arena: Arena) -> None:
    """Wait until a rank says that it joins or loads."""
    until_s = time.monotonic() + 30.0
    while True:
        status = arena.stack.try_status()
        states = {rank.state for rank in status.ranks} if status is not None else set()
        if states & {"joining", "loading"}:
            return
        if time.monotonic() > until_s:
            raise Stuck("no rank loads within 30 s of the death of one")


def _kill_during_recovery(arena: Arena) -> None:
    """A second process dies while streams wait for the world to come back."""
    gone = {arena.stack.signal(arena.rank_in_turn(), signal.SIGKILL)}
    time.sleep(arena.chance.uniform(0.05, arena.stack.load_s))
    victims = [f"rank {rank}" for rank in range(arena.ranks)]
    gone.add(arena.stack.signal(arena.chance.choice(victims), signal.SIGKILL))
    arena.wait_served(gone)


def _kill_all(arena: Arena) -> None:
    """Everything but gateway and supervisor at once, as when memory runs out."""
    pids = arena.stack.pids()
    arena.stack.log.note("SIGKILL to the scheduler, the store and all ranks")
    for role, pid in pids.items():
        if role != "gateway":
            processes.send(pid, signal.SIGKILL)
    arena.wait_served(pids.values())


def _stop(arena: Arena) -> None:
    """The scheduler must give it up at its step's deadline, and the supervisor must kill it."""
    began_s = time.monotonic()
    pid = arena.stack.signal(arena.rank_in_turn(), signal.SIGSTOP)
    try:
        if arena.turn % 2:
            # Thawed at the moment of its dismissal it must end by itself, without a word.
            _wait_epoch_ended(arena, began_s)
            processes.send(pid, signal.SIGCONT)
        arena.wait_served({pid}, 40.0)
        arena.expect_gone({pid}, DISMISSED_GONE_S, "stopped rank")
    finally:
        processes.send(pid, signal.SIGCONT)


def _wait_epoch_ended(arena: Arena, since_s: float) -> None:
    until_s = time.monotonic() + 40.0
    while not arena.stack.log.since(since_s, "epoch_ended"):
        if time.monotonic() > until_s:
            raise Stuck("the epoch of a stopped rank did not end within 40 s")
        time.sleep(0.01)


def _stop_shortly(arena: Arena) -> None:
    before = arena.stack.status()
    pid = arena.stack.signal(arena.rank_in_turn(), signal.SIGSTOP)
    time.sleep(1.0)
    processes.send(pid, signal.SIGCONT)
    arena.expect_same(before, arena.wait_served())


FAULTS = (
    Fault("rank-kill-decode", "a pause", _kill),
    Fault("rank-kill-prefill", "a pause", _kill, phase="prefill"),
    Fault("rank-kill-mixed", "a pause", _kill, phase="mixed"),
    Fault("rank-kill-idle", "serves again", _kill_idle, phase="decode"),
    Fault("rank-kill-load", "serves again", _kill_while_loading, phase="decode"),
    Fault("rank-kill-recovery", "a pause", _kill_during_recovery, phase="mixed", loads=2),
    Fault("all-but-gateway-kill", "a pause", _kill_all, loads=2, may_refuse=True),
    Fault("rank-stop", "killed, a pause", _stop, phase="decode", extra_s=DEADLINE_MIN_S),
    Fault("rank-stop-1s", "same world", _stop_shortly, phase="mixed", loads=0, extra_s=1.0),
)
