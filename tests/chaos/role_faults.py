"""Scheduler, cache store, gateway and supervisor that die or stop."""

import signal
import time

from tests.chaos import processes
from tests.chaos.fault import RECOVERY_GRACE_S, Arena, Fault
from tests.chaos.rank_faults import wait_loading
from tests.chaos.stack import LOOK_S, Stuck
from tests.chaos.up import Up
from tests.ports import is_free

RANKS_GONE_S = 12.0
"""Ranks see the end of the scheduler's connection, or its silence of ten seconds."""
ABORTED_S = 2.0
"""What a dead gateway owned is aborted within this time."""
ORPHANS_GONE_S = 3.0
STORE_STOPPED_S = 4.0
JOINING_S = 10.0
INSIDE_JOIN_S = 0.6


def _kill_scheduler(arena: Arena) -> None:
    ranks = {rank.pid for rank in arena.stack.status().ranks}
    arena.stack.signal("scheduler", signal.SIGKILL)
    arena.expect_gone(ranks, RANKS_GONE_S, "ranks of a dead scheduler")
    arena.wait_served(ranks)


def _stop_scheduler(arena: Arena, seconds: float) -> tuple[int, int]:
    """Stop the scheduler for a while; return the epochs before and after."""
    before = arena.stack.status()
    pid = arena.stack.signal("scheduler", signal.SIGSTOP)
    time.sleep(seconds)
    processes.send(pid, signal.SIGCONT)
    after = arena.wait_served()
    if arena.stack.pid("scheduler") != pid:
        arena.complain("the scheduler's process is another one")
    if seconds <= 1.0:
        arena.expect_same(before, after)
    return before.epoch, after.epoch


def _stop_scheduler_1s(arena: Arena) -> None:
    _stop_scheduler(arena, 1.0)


def _stop_scheduler_8s(arena: Arena) -> None:
    before, after = _stop_scheduler(arena, 8.0)
    arena.note("epochs", after - before)


def _kill_store(arena: Arena) -> None:
    before = arena.stack.status()
    pid = arena.stack.signal("store", signal.SIGKILL)
    _wait_another(arena, "store", pid)
    arena.expect_same(before, arena.wait_served())


def _stop_store(arena: Arena) -> None:
    before = arena.stack.status()
    pid = arena.stack.signal("store", signal.SIGSTOP)
    time.sleep(STORE_STOPPED_S)
    processes.send(pid, signal.SIGCONT)
    arena.expect_same(before, arena.wait_served())


def _wait_another(arena: Arena, role: str, pid: int) -> None:
    until_s = time.monotonic() + 20.0
    while arena.stack.pid(role) == pid:
        if time.monotonic() > until_s:
            raise Stuck(f"{role} was not started again within 20 s")
        time.sleep(LOOK_S)


def _kill_gateway(arena: Arena) -> None:
    """What it owned is aborted; rows are free although nobody asked for that."""
    arena.load.wait_progress(time.monotonic(), 30.0)
    before = arena.stack.status()
    # Nothing new may arrive through the next gateway before the old one's rows were counted.
    arena.load.begin("idle")
    pid = arena.stack.signal("gateway", signal.SIGKILL)
    began_s = time.monotonic()
    while True:
        status = arena.stack.status()
        used = status.running + status.waiting + status.kv_tokens_used
        # No other slack: in a few seconds more they would have ended by themselves.
        aborted_s = ABORTED_S + arena.load.longest_stall(began_s, time.monotonic())
        if used == 0 or time.monotonic() - began_s > aborted_s:
            break
    arena.note("aborted s", time.monotonic() - began_s)
    if used:
        arena.complain(
            f"{aborted_s:.1f} s after the gateway's death {status.running} requests run, "
            f"{status.waiting} wait, {status.kv_tokens_used} tokens are held"
        )
    _wait_another(arena, "gateway", pid)
    arena.expect_same(before, arena.stack.wait_ready())
    arena.load.begin("decode")
    arena.wait_served()


def _kill_supervisor(arena: Arena) -> None:
    _kill_supervisor_now(arena)


def _kill_supervisor_while_joining(arena: Arena) -> None:
    """A rank waits for a peer that will never join when the supervisor dies."""
    last = f"rank {arena.ranks - 1}"
    arena.stack.signal(last, signal.SIGKILL)
    wait_loading(arena)
    began_s = time.monotonic()
    peer = arena.stack.signal(last, signal.SIGSTOP)
    # The line is written just before a rank dials the ring.
    until_s = began_s + JOINING_S
    while not arena.stack.log.since(began_s, "cores_pinned") and time.monotonic() < until_s:
        time.sleep(LOOK_S)
    time.sleep(INSIDE_JOIN_S)
    processes.send(peer, signal.SIGKILL)
    _kill_supervisor_now(arena)


def _kill_supervisor_now(arena: Arena) -> None:
    stack = arena.stack
    assert isinstance(stack, Up)
    left = stack.kill_supervisor()
    arena.expect_gone(left, ORPHANS_GONE_S, "orphans")
    for pid in processes.pids_alive(left):
        processes.send(pid, signal.SIGKILL)
    free_s = ORPHANS_GONE_S + arena.slack_s
    until_s = time.monotonic() + free_s
    while not is_free(stack.port):
        if time.monotonic() > until_s:
            arena.complain(f"the port is not free {free_s:.0f} s after the death")
            break
        time.sleep(LOOK_S)
    began_s = time.monotonic()
    stack.forget_link()
    stack.start()
    started_s = time.monotonic() - began_s
    arena.note("next start s", started_s)
    load_s = max(stack.load_s, stack.youngest_s)
    if started_s > load_s + RECOVERY_GRACE_S + arena.slack_s:
        arena.complain(f"the next start took {started_s:.1f} s, loading takes {load_s:.1f} s")
    arena.wait_served()


FAULTS = (
    Fault("scheduler-kill", "a pause", _kill_scheduler, phase="mixed", may_refuse=True),
    Fault("scheduler-stop-1s", "same world", _stop_scheduler_1s, loads=0, extra_s=1.0),
    Fault("scheduler-stop-8s", "a pause", _stop_scheduler_8s, extra_s=8.0, may_refuse=True),
    Fault("store-kill", "nobody notices", _kill_store, phase="mixed", loads=0),
    Fault("store-stop", "nobody notices", _stop_store, phase="mixed", loads=0),
    Fault("gateway-kill", "its streams end, rows free", _kill_gateway, may_lose=True,
          may_refuse=True),
    Fault("supervisor-kill-joining", "no orphan, starts again", _kill_supervisor_while_joining,
          may_lose=True, may_refuse=True, ranks_min=2),
    Fault("supervisor-kill", "no orphan, starts again", _kill_supervisor, may_lose=True,
          may_refuse=True),
)  # fmt: skip
