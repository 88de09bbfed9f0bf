"""The rank's thread on the bus: hears orders, says facts, ends the process. Never waits on MLX.

The main thread may be inside a collective that never returns, so whatever ends this process (an
order to leave, a scheduler that is gone) ends it from here, with `os._exit`.
"""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from shared import limits
from shared.clock import Clock, SystemClock
from shared.errors import LinkFull, PeerUnknown
from shared.log import Log
from shared.messages import (
    Heartbeat,
    JoinWorld,
    LeaveWorld,
    Message,
    RankHello,
    RestoreBlocks,
    StepPlan,
    ToRank,
)
from shared.transport.links import Connected, Dialer, LinkEvent, Lost, Received

_log = Log("rank_worker.bus")

HEARTBEAT_S = 1.0
"""How often a rank in a world says which step it has reached."""

FLUSH_S = 0.2
"""How long the last words may take. The world waits for this process to be gone."""

Order = JoinWorld | StepPlan


class SchedulerLink:
    """The link to the scheduler, in a thread. `orders`, `say` and `end` are for the main thread.

    Plans wait in `orders` for the main thread. Restores do not: they go on beside the steps.
    """

    def __init__(
        self,
        address: str,
        hello: RankHello,
        clock: Clock | None = None,
        end_process: Callable[[int], object] = os._exit,
        keys_dir: Path | None = None,
    ) -> None:
        """Open the link; `start` begins to use it.

        Raises:
            ConfigError: the address is not allowed.
        """
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.step_started = 0
        self.step_finished = 0
        self.refused = 0
        """Orders for another epoch, and restores before there was somebody to take them."""
        self.restore: Callable[[RestoreBlocks], object] | None = None
        """Who takes restores of this epoch, in this thread, without waiting."""
        self.left: Callable[[LeaveWorld], object] | None = None
        """Who is told why the epoch has ended, in this thread, before it ends the process."""
        self._hello = hello
        self._clock = clock or SystemClock()
        self._end_process = end_process
        self._link: Dialer[ToRank] = Dialer(address, "rank", ToRank, self._clock, keys_dir=keys_dir)
        self._outgoing: deque[Message] = deque()
        self._thread = threading.Thread(target=self._run, name="bus", daemon=True)
        self._exit_code: int | None = None
        self._leaves_at_s: float | None = None
        """When it ends at the latest, once it is to end."""
        self._epoch = 0
        self._rank = hello.rank
        self._heartbeat_at_s = 0.0

    def start(self) -> None:
        """Say hello to the scheduler as soon as it is there, and listen."""
        self._thread.start()

    def say(self, message: Message) -> None:
        """Send a message, in order, without waiting. Thread-safe."""
        self._outgoing.append(message)
        self._link.wake()

    def end(self, exit_code: int) -> None:
        """End the process after what was said has left, or `FLUSH_S` later. Does not return."""
        self.begin_end(exit_code)
        self._thread.join(timeout=5 * FLUSH_S)
        self._end_process(exit_code)

    def begin_end(self, exit_code: int) -> None:
        """Let the thread end the process, as `end`, without waiting for it."""
        self._exit_code = exit_code
        self._link.wake()

    def due_in_s(self) -> float:
        """Return after how many seconds `turn` has something to do by itself, 0 or more."""
        now_s = self._clock.now()
        if self._leaves_at_s is not None:
            return max(0.0, self._leaves_at_s - now_s)
        if self._exit_code is not None:
            return 0.0
        return min(self._until_heartbeat_s(), self._link.due_in_s(now_s))

    def turn(self) -> bool:
        """Wait for news, take them, say what is to be said; False when the process has ended."""
        if self._exit_code is not None:
            return self._leave(self._exit_code)
        for event in self._link.poll(self._until_heartbeat_s()):
            self._take(event)
        self._beat()
        self._flush()
        return True

    def _run(self) -> None:
        try:
            while self.turn():
                pass
        except Exception:  # noqa: BLE001 - the top of this thread
            _log.exception("bus_failed")
            self._end_process(limits.EXIT_SOFTWARE)

    def _take(self, event: LinkEvent[ToRank]) -> None:
        match event:
            case Connected():
                if self._epoch == 0:
                    self._outgoing.append(self._hello)
            case Lost(cause=cause):
                if self._epoch:
                    _log.error("scheduler_lost", cause=cause)
                    self._exit_code = limits.EXIT_WORLD_LOST
            case Received(message=LeaveWorld() as message):
                self._take_leave(message)
            case Received(message=JoinWorld() as message):
                self._take_join(message)
            case Received(message=StepPlan() as message):
                if message.epoch == self._epoch:
                    self.orders.put(message)
                else:
                    self._refuse("step_plan", message.epoch)
            case Received(message=RestoreBlocks() as message):
                if message.epoch == self._epoch and self.restore is not None:
                    self.restore(message)
                else:
                    self._refuse("restore_blocks", message.epoch)

    def _take_join(self, message: JoinWorld) -> None:
        if self._epoch:
            # A group cannot be rebuilt inside a process: another world needs another process.
            _log.error("joined_already", epoch=self._epoch, asked=message.epoch)
            self._exit_code = limits.EXIT_WORLD_LOST
            return
        self._epoch = message.epoch
        self._rank = message.rank
        self.orders.put(message)

    def _take_leave(self, message: LeaveWorld) -> None:
        if not self._epoch or message.epoch != self._epoch:
            self._refuse("leave_world", message.epoch)
            return
        _log.info("left_world", epoch=message.epoch, cause=message.cause, detail=message.detail)
        if self.left is not None:
            self.left(message)
        self._exit_code = limits.EXIT_WORLD_LOST

    def _refuse(self, order: str, epoch: int) -> None:
        self.refused += 1
        _log.warning("order_refused", order=order, epoch=epoch, own_epoch=self._epoch)

    def _until_heartbeat_s(self) -> float:
        if not self._epoch:
            return HEARTBEAT_S
        return max(0.0, self._heartbeat_at_s + HEARTBEAT_S - self._clock.now())

    def _beat(self) -> None:
        if self._epoch and self._until_heartbeat_s() <= 0.0:
            self._heartbeat_at_s = self._clock.now()
            self._outgoing.append(
                Heartbeat(
                    epoch=self._epoch,
                    rank=self._rank,
                    step_started=self.step_started,
                    step_finished=self.step_finished,
                )
            )

    def _flush(self) -> None:
        while self._outgoing:
            try:
                self._link.send(self._outgoing[0], self._epoch)
            except (LinkFull, PeerUnknown):
                # Full: later. No session: either one begins soon, or `Lost` ends this process.
                return
            self._outgoing.popleft()

    def _leave(self, exit_code: int) -> bool:
        """Send what is left, wait for its acknowledgement for a moment, end the process."""
        now_s = self._clock.now()
        if self._leaves_at_s is None:
            self._leaves_at_s = now_s + FLUSH_S
        self._flush()
        if self._link.unacknowledged and now_s < self._leaves_at_s:
            # Whatever it hears now comes too late.
            self._link.poll(self._leaves_at_s - now_s)
            return True
        self._link.close(0.0)
        self._end_process(exit_code)
        return False
