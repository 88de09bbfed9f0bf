"""Rank without a model: runs step plans like a real rank, but sleeps instead of computing.

A bus thread owns the link and feeds a queue, as in the rank worker. Behind it is one of two
devices:

- `inline`: the thread that takes plans also sleeps and writes the receipt, one step after the
  other, like a backend whose evaluation blocks. All work between two sleeps is exposed.
- `queued`: the thread launches plans on a device thread with a queue and waits for the oldest
  result, in the order of the rank worker's step loop. This is a GPU, which continues without the
  host while its queue holds work.

The begin and end of each step are recorded around the sleep itself, so that a sleep that takes too
long counts as work and not as a gap between steps.

    python -m services.commands.bench.fake_ranks.sleeping_rank RANK_ADDRESS RANK TIMES_FILE
"""

import hashlib
import mmap
import os
import queue
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shared import limits
from shared.messages import (
    Heartbeat,
    JoinWorld,
    LeaveWorld,
    RankHello,
    RankReady,
    StepFinished,
    StepPlan,
    ToRank,
)
from shared.os import lifeline
from shared.transport.links import Connected, Dialer, Lost, Received

STEPS_MAX = 200_000
"""Largest number of steps in a times file."""

HEADER = struct.Struct("<dQQQ")
"""Seconds per step; 1: spin instead of sleep; 1: queued device; number of recorded steps."""

STEP = struct.Struct("<ddQ")
"""Begin and end (monotonic seconds), number of decodes in the step."""

TIMES_BYTES = HEADER.size + STEPS_MAX * STEP.size
HEARTBEAT_S = 0.5

_SPIN_BLOCK = bytes(32 * 1024)
"""Data whose hash takes some tens of microseconds."""

PLAN_WAIT_S = 0.002
PLAN_WAIT_SHARE = 0.5
"""Longest wait for the next plan before a wait for a result, as in the rank worker: seconds, and
share of the last step's time."""


class StepTimesFile:
    """A memory-mapped file through which the benchmark sets the step time and reads step times."""

    def __init__(self, path: Path) -> None:
        """Open the file; create it if it does not exist."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, TIMES_BYTES)
        self._memory = mmap.mmap(descriptor, TIMES_BYTES)
        os.close(descriptor)

    def set_pace(self, step_s: float, *, spins: bool, queued: bool) -> None:
        """Set how the rank's simulated device runs steps and for how long; delete recorded steps.

        Call it only while no step runs.

        Args:
            step_s: duration of a step in seconds.
            spins: compute hashes during a step instead of sleeping.
            queued: run steps on a thread with a queue, in which the next plan can wait as on a
                GPU; False: on the thread that also writes the receipts.
        """
        HEADER.pack_into(self._memory, 0, step_s, spins, queued, 0)

    def pace(self) -> tuple[float, bool, bool]:
        """Return (seconds per step, spins, queued), as `set_pace` has set them."""
        step_s, spins, queued, _ = HEADER.unpack_from(self._memory, 0)
        return step_s, bool(spins), bool(queued)

    def record(self, begin_s: float, end_s: float, decodes: int) -> None:
        """Append one step; do nothing when STEPS_MAX steps are recorded.

        Args:
            begin_s: monotonic time at which the device began the step.
            end_s: monotonic time at which the device ended the step.
            decodes: number of sequences that the step decoded.
        """
        step_s, spins, queued, count = HEADER.unpack_from(self._memory, 0)
        if count < STEPS_MAX:
            offset = HEADER.size + count * STEP.size
            STEP.pack_into(self._memory, offset, begin_s, end_s, decodes)
            HEADER.pack_into(self._memory, 0, step_s, spins, queued, count + 1)

    def steps(self) -> list[tuple[float, float, int]]:
        """Return each recorded step in order: (begin, end, decodes), times in monotonic seconds."""
        count = HEADER.unpack_from(self._memory, 0)[3]
        return [STEP.unpack_from(self._memory, HEADER.size + n * STEP.size) for n in range(count)]


class SleepingRank:
    """A rank that joins a scheduler's world and sleeps for each step plan instead of computing.

    Args:
        address: address of the scheduler's link for ranks.
        rank: number of this rank.
        times: tells the duration of steps and receives the begin and end of each step.
    """

    def __init__(self, address: str, rank: int, times: StepTimesFile) -> None:
        self._rank = rank
        self._times = times
        self._link: Dialer[Any] = Dialer(address, f"rank-{rank}", ToRank)
        self._plans: queue.SimpleQueue[StepPlan] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[StepPlan] = queue.SimpleQueue()
        self._computed: queue.SimpleQueue[tuple[StepPlan, float, float]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[StepFinished] = queue.SimpleQueue()
        self._epoch = 0
        self._finished = 0
        self._previous_end_s = 0.0

    def run(self) -> None:
        """Serve the link and run step plans until the world ends or the link is lost."""
        for work in (self._host, self._device):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
        beat_at_s = 0.0
        while True:
            for event in self._link.poll(HEARTBEAT_S):
                if not self._take(event):
                    self._link.close()
                    return
            while not self._outbox.empty():
                self._link.send(self._outbox.get(), self._epoch)
            now_s = time.monotonic()
            if self._epoch and self._link.is_connected and now_s - beat_at_s > HEARTBEAT_S:
                beat_at_s = now_s
                beat = Heartbeat(
                    epoch=self._epoch,
                    rank=self._rank,
                    step_started=self._finished,
                    step_finished=self._finished,
                )
                self._link.send(beat, self._epoch)

    def _take(self, event: Any) -> bool:
        match event:
            case Connected():
                self._link.send(self._hello())
            case Lost():
                return False
            case Received(message=JoinWorld() as order):
                self._epoch = order.epoch
                self._link.send(self._ready(order.rank), self._epoch)
            case Received(message=StepPlan() as plan):
                self._plans.put(plan)
            case Received(message=LeaveWorld()):
                return False
        return True

    def _hello(self) -> RankHello:
        return RankHello(
            rank=self._rank,
            host="bench",
            pid=os.getpid(),
            data_address="127.0.0.1:1",
            launched=False,
            device="sleeper",
            mlx_version="none",
            memory_bytes=2**40,
        )

    def _ready(self, rank: int) -> RankReady:
        self._rank = rank
        return RankReady(
            rank=rank,
            model_fingerprint="sleeper",
            kv_bytes_per_token=1,
            kv_bytes_per_row=0,
            kv_budget_bytes=2**40,
            context_tokens_max=2**20,
            vocab_size=4_096,
            can_roll_back=True,
            blas="",
        )

    def _host(self) -> None:
        launched = 0
        began_s = busy_s = 0.0
        while True:
            plan = self._next_plan(
                began_s + min(PLAN_WAIT_S, PLAN_WAIT_SHARE * busy_s) if launched else None
            )
            if plan is not None and not self._times.pace()[2]:
                self._report(plan, *self._compute(plan))
                continue
            if launched == 0:
                began_s = time.monotonic()
            if plan is not None:
                self._launched.put(plan)
                launched += 1
            if plan is None or launched >= limits.PLANS_IN_FLIGHT:
                self._report(*self._computed.get())
                launched -= 1
                now_s = time.monotonic()
                busy_s, began_s = now_s - began_s, now_s

    def _next_plan(self, until_s: float | None) -> StepPlan | None:
        if until_s is None:
            return self._plans.get()
        wait_s = max(0.0, until_s - time.monotonic())
        try:
            return self._plans.get(block=wait_s > 0.0, timeout=wait_s)
        except queue.Empty:
            return None

    def _device(self) -> None:
        while True:
            plan = self._launched.get()
            self._computed.put((plan, *self._compute(plan)))

    def _compute(self, plan: StepPlan) -> tuple[float, float]:
        step_s, spins, _ = self._times.pace()
        begin_s = time.monotonic()
        if spins:
            while time.monotonic() < begin_s + step_s:
                # Releases the GIL, as a matrix product does.
                hashlib.blake2b(_SPIN_BLOCK)
        else:
            time.sleep(step_s)
        end_s = time.monotonic()
        self._times.record(begin_s, end_s, len(plan.decodes))
        return begin_s, end_s

    def _report(self, plan: StepPlan, begin_s: float, end_s: float) -> None:
        idle_s = max(0.0, begin_s - self._previous_end_s) if self._previous_end_s else 0.0
        self._previous_end_s = end_s
        self._finished = plan.step_id
        sampled = sum(chunk.samples for chunk in plan.prefill_chunks) + len(plan.decodes)
        receipt = StepFinished(
            epoch=plan.epoch,
            step_id=plan.step_id,
            rank=self._rank,
            digest=hashlib.blake2b(plan.step_id.to_bytes(8, "big"), digest_size=16).digest(),
            tokens=[[7]] * sampled if self._rank == 0 else [],
            busy_ms=(end_s - begin_s) * 1_000,
            idle_ms=idle_s * 1_000,
            memory_bytes=0,
        )
        self._outbox.put(receipt)
        self._link.wake()


if __name__ == "__main__":
    lifeline.exit_with_parent()
    SleepingRank(sys.argv[1], int(sys.argv[2]), StepTimesFile(Path(sys.argv[3]))).run()
