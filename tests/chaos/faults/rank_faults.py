"""Rank processes that die or stop, in every state of the world."""

import signal
import time

from tests.chaos.cluster import processes
from tests.chaos.cluster.stack import wait_for
from tests.chaos.faults.fault import Fault, FaultContext

OTHERS_GONE_S = 2.0
"""The other ranks leave within a second of the epoch's end, which they see within a second."""
DEADLINE_MIN_S = 5.0
"""The shortest step deadline; steps of the demo model have no longer one."""
STOPPED_GONE_S = 3.0
"""Seconds after the next world is ready; the stopped process was killed long before."""


def _kill(context: FaultContext) -> None:
    before = {rank.pid for rank in context.stack.status().ranks}
    pid = context.stack.signal(context.target_rank, signal.SIGKILL)
    context.expect_gone(before - {pid}, OTHERS_GONE_S, "other ranks")
    context.wait_until_served(before | {pid})


def _kill_idle(context: FaultContext) -> None:
    context.load.drain()
    pid = context.stack.signal(context.target_rank, signal.SIGKILL)
    context.stack.wait_until_ready({pid})
    context.load.set_phase("decode")
    context.wait_until_served()


def _kill_while_loading(context: FaultContext) -> None:
    """Kill another rank while a world without open streams loads."""
    context.load.drain()
    context.stack.end_spares()
    first = context.stack.signal(context.target_rank, signal.SIGKILL)
    wait_until_loading(context)
    time.sleep(context.rng.uniform(0.0, 0.6 * context.stack.load_s))
    role = f"rank {context.rng.randrange(context.world_size)}"
    second = context.stack.signal(role, signal.SIGKILL)
    context.stack.wait_until_ready({first, second})
    context.load.set_phase("decode")
    context.wait_until_served()


def wait_until_loading(context: FaultContext) -> None:
    """Wait until a rank reports that it joins or loads."""

    def is_loading() -> bool:
        status = context.stack.try_status()
        states = {rank.state for rank in status.ranks} if status is not None else set()
        return bool(states & {"joining", "loading"})

    wait_for(is_loading, 30.0, "no rank loads after the death of one")


def _kill_during_recovery(context: FaultContext) -> None:
    """Kill a second rank while streams wait for the next world."""
    gone = {context.stack.signal(context.target_rank, signal.SIGKILL)}
    time.sleep(context.rng.uniform(0.05, context.stack.load_s))
    victims = [f"rank {rank}" for rank in range(context.world_size)]
    gone.add(context.stack.signal(context.rng.choice(victims), signal.SIGKILL))
    context.wait_until_served(gone)


def _kill_all(context: FaultContext) -> None:
    """Kill all but gateway and supervisor at once, as when memory is exhausted."""
    pids = context.stack.pids()
    context.stack.log.note("SIGKILL to the scheduler, the store and all ranks")
    for role, pid in pids.items():
        if role != "gateway":
            processes.send_signal(pid, signal.SIGKILL)
    context.wait_until_served(pids.values())


def _kill_after_cleaning(context: FaultContext) -> None:
    """Delete every file in the run folder, as cleaners of temporary folders do; kill a rank."""
    before = {rank.pid for rank in context.stack.status().ranks}
    context.stack.log.note("all files in the run folder are deleted")
    for file in context.stack.config.run_dir.iterdir():
        file.unlink(missing_ok=True)
    pid = context.stack.signal(context.target_rank, signal.SIGKILL)
    context.wait_until_served(before | {pid})


def _stop(context: FaultContext) -> None:
    """Stop a rank: the scheduler loses it at the step deadline, the supervisor kills it."""
    began_s = time.monotonic()
    pid = context.stack.signal(context.target_rank, signal.SIGSTOP)
    try:
        if context.repetition % 2:
            # A rank that continues just after its epoch ended must exit without a message.
            wait_for(
                lambda: context.stack.log.since(began_s, "epoch_ended"),
                40.0,
                "the epoch of a stopped rank did not end",
                poll_s=0.01,
            )
            processes.send_signal(pid, signal.SIGCONT)
        context.wait_until_served({pid}, 40.0)
        context.expect_gone({pid}, STOPPED_GONE_S, "stopped rank")
    finally:
        processes.send_signal(pid, signal.SIGCONT)


def _stop_for_1s(context: FaultContext) -> None:
    before = context.stack.status()
    pid = context.stack.signal(context.target_rank, signal.SIGSTOP)
    time.sleep(1.0)
    processes.send_signal(pid, signal.SIGCONT)
    context.expect_same_world(before, context.wait_until_served())


FAULTS = (
    Fault("rank-kill-decode", "a pause", _kill),
    Fault("rank-kill-prefill", "a pause", _kill, phase="prefill"),
    Fault("rank-kill-mixed", "a pause", _kill, phase="mixed"),
    Fault("rank-kill-idle", "serves again", _kill_idle, phase="decode"),
    Fault("rank-kill-load", "serves again", _kill_while_loading, phase="decode"),
    Fault("rank-kill-recovery", "a pause", _kill_during_recovery, phase="mixed", loads=2),
    Fault("rank-kill-cleaned", "a pause", _kill_after_cleaning, phase="mixed", extra_s=1.0),
    Fault("all-but-gateway-kill", "a pause", _kill_all, loads=2, may_refuse=True),
    Fault("rank-stop", "killed, a pause", _stop, phase="decode", extra_s=DEADLINE_MIN_S),
    Fault("rank-stop-1s", "same world", _stop_for_1s, phase="mixed", loads=0, extra_s=1.0),
)
