"""Scheduler, cache store, gateway and supervisor that die or stop."""

import contextlib
import signal
import time

from tests.chaos.cluster import processes
from tests.chaos.cluster.stack import DeadlineExceeded, wait_for
from tests.chaos.cluster.supervised_stack import SupervisedStack
from tests.chaos.faults.fault import RECOVERY_GRACE_S, Fault, FaultContext
from tests.chaos.faults.rank_faults import wait_until_loading
from tests.support.ports import is_free

RANKS_GONE_S = 12.0
"""Ranks end when the scheduler's connection closes or is silent for ten seconds."""
ABORTED_S = 2.0
"""Seconds within which the requests of a dead gateway are aborted."""
ORPHANS_GONE_S = 3.0
STORE_STOPPED_S = 4.0
JOINING_S = 10.0
INSIDE_JOIN_S = 0.6


def _kill_scheduler(context: FaultContext) -> None:
    ranks = {rank.pid for rank in context.stack.status().ranks}
    context.stack.signal("scheduler", signal.SIGKILL)
    context.expect_gone(ranks, RANKS_GONE_S, "ranks of a dead scheduler")
    context.wait_until_served(ranks)


def _stop_scheduler(context: FaultContext, seconds: float) -> tuple[int, int]:
    """Stop the scheduler for `seconds`; return the epochs before and after."""
    before = context.stack.status()
    pid = context.stack.signal("scheduler", signal.SIGSTOP)
    time.sleep(seconds)
    processes.send_signal(pid, signal.SIGCONT)
    after = context.wait_until_served()
    if context.stack.pid("scheduler") != pid:
        context.add_problem("the scheduler's process was replaced")
    if seconds <= 1.0:
        context.expect_same_world(before, after)
    return before.epoch, after.epoch


def _stop_scheduler_1s(context: FaultContext) -> None:
    _stop_scheduler(context, 1.0)


def _stop_scheduler_8s(context: FaultContext) -> None:
    before, after = _stop_scheduler(context, 8.0)
    context.record_figure("epochs", after - before)


def _kill_store(context: FaultContext) -> None:
    before = context.stack.status()
    pid = context.stack.signal("store", signal.SIGKILL)
    _wait_until_restarted(context, "store", pid)
    context.expect_same_world(before, context.wait_until_served())


def _stop_store(context: FaultContext) -> None:
    before = context.stack.status()
    pid = context.stack.signal("store", signal.SIGSTOP)
    time.sleep(STORE_STOPPED_S)
    processes.send_signal(pid, signal.SIGCONT)
    context.expect_same_world(before, context.wait_until_served())


def _wait_until_restarted(context: FaultContext, role: str, pid: int) -> None:
    wait_for(lambda: context.stack.pid(role) != pid, 20.0, f"{role} was not restarted")


def _kill_gateway(context: FaultContext) -> None:
    """Kill the gateway; its requests are aborted and their rows freed without a request."""
    context.load.wait_for_tokens(time.monotonic(), 30.0)
    before = context.stack.status()
    # The next gateway may not add requests before the rows of the old one are counted.
    context.load.set_phase("idle")
    pid = context.stack.signal("gateway", signal.SIGKILL)
    began_s = time.monotonic()
    while True:
        status = context.stack.status()
        used = status.running + status.waiting + status.kv_tokens_used
        # No more slack than this: the requests would end by themselves a few seconds later.
        aborted_s = ABORTED_S + context.load.longest_stall(began_s, time.monotonic())
        if used == 0 or time.monotonic() - began_s > aborted_s:
            break
    context.record_figure("aborted s", time.monotonic() - began_s)
    if used:
        context.add_problem(
            f"{aborted_s:.1f} s after the gateway's death {status.running} requests run, "
            f"{status.waiting} wait, {status.kv_tokens_used} KV tokens are in use"
        )
    _wait_until_restarted(context, "gateway", pid)
    context.expect_same_world(before, context.stack.wait_until_ready())
    context.load.set_phase("decode")
    context.wait_until_served()


def _kill_supervisor(context: FaultContext) -> None:
    _kill_supervisor_now(context)


def _kill_supervisor_while_joining(context: FaultContext) -> None:
    """Kill the supervisor while a rank waits for a peer that will not join."""
    last = f"rank {context.world_size - 1}"
    context.stack.end_spares()
    context.stack.signal(last, signal.SIGKILL)
    wait_until_loading(context)
    began_s = time.monotonic()
    peer = context.stack.signal(last, signal.SIGSTOP)
    # A rank logs this just before it connects to the ring.
    with contextlib.suppress(DeadlineExceeded):
        wait_for(lambda: context.stack.log.since(began_s, "cores_pinned"), JOINING_S, "")
    time.sleep(INSIDE_JOIN_S)
    processes.send_signal(peer, signal.SIGKILL)
    _kill_supervisor_now(context)


def _kill_supervisor_now(context: FaultContext) -> None:
    stack = context.stack
    assert isinstance(stack, SupervisedStack)
    left = stack.kill_supervisor()
    context.expect_gone(left, ORPHANS_GONE_S, "orphans")
    for pid in processes.pids_alive(left):
        processes.send_signal(pid, signal.SIGKILL)
    free_s = ORPHANS_GONE_S + context.slack_s
    try:
        wait_for(lambda: is_free(stack.port), free_s, "the port of a dead gateway is not free")
    except DeadlineExceeded as error:
        context.add_problem(str(error))
    began_s = time.monotonic()
    stack.close_status_link()
    stack.start()
    started_s = time.monotonic() - began_s
    context.record_figure("next start s", started_s)
    load_s = max(stack.load_s, stack.youngest_rank_age_s)
    if started_s > load_s + RECOVERY_GRACE_S + context.slack_s:
        context.add_problem(f"the next start took {started_s:.1f} s, loading takes {load_s:.1f} s")
    context.wait_until_served()


FAULTS = (
    Fault("scheduler-kill", "a pause", _kill_scheduler, phase="mixed", may_refuse=True),
    Fault("scheduler-stop-1s", "same world", _stop_scheduler_1s, loads=0, extra_s=1.0),
    Fault("scheduler-stop-8s", "a pause", _stop_scheduler_8s, extra_s=8.0, may_refuse=True),
    Fault("store-kill", "no effect", _kill_store, phase="mixed", loads=0),
    Fault("store-stop", "no effect", _stop_store, phase="mixed", loads=0),
    Fault("gateway-kill", "its streams end, rows free", _kill_gateway, may_lose=True,
          may_refuse=True),
    Fault("supervisor-kill-joining", "no orphan, starts again", _kill_supervisor_while_joining,
          may_lose=True, may_refuse=True, ranks_min=2),
    Fault("supervisor-kill", "no orphan, starts again", _kill_supervisor, may_lose=True,
          may_refuse=True),
)  # fmt: skip
