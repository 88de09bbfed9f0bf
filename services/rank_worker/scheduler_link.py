"""Link of a rank to the scheduler, in a thread of its own. Never waits on MLX.

Receives orders, sends facts, and ends the process with `os._exit` when the scheduler orders it or
is lost: the main thread may be inside a collective that never returns.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from shared import limits
from shared.clock import Clock, SystemClock
from shared.errors import LinkFull, PeerUnknown
from shared.log import Log
from shared.messages import (
    Heartbeat,
    JoinWorld,
    LeaveWorld,
    Message,
    PlaceTaken,
    RankFailed,
    RankHello,
    RestoreBlocks,
    StepPlan,
    StepsMeasured,
    ToRank,
)
from shared.transport.links import Connected, Dialer, LinkEvent, Lost, Received

_log = Log("rank_worker.scheduler_link")

HEARTBEAT_S = 1.0
"""Interval at which a rank in a world reports its step."""

FLUSH_S = 0.2
"""Longest time for sending the last messages. The next world starts when this process is gone."""

Order = JoinWorld | StepPlan


class SchedulerLink:
    """The thread that receives a rank's orders from the scheduler and sends its messages.

    `orders`, `send` and `exit` are for the main thread. Plans wait in `orders` for the main thread.
    Restore orders go to `on_restore` and run beside the steps.
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

        Args:
            address: of the scheduler.
            hello: first message of every session until a world is joined.
            clock: measures heartbeats and deadlines.
            end_process: called with the exit code.
            keys_dir: folder of the link keys; None: no encryption.

        Raises:
            ConfigError: the address is not allowed.
        """
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        """The order to join, then the step plans, in the order of arrival."""
        self.arrivals_s: deque[float] = deque()
        """When each of the plans in `orders` has arrived."""
        self.take_measurements: Callable[[], StepsMeasured | None] | None = None
        """Called in this thread with each heartbeat; returns the new measurements."""
        self.step_started = 0
        """Id of the last step that was launched; the main thread sets it for heartbeats."""
        self.step_finished = 0
        """Id of the last step whose receipt was sent; the main thread sets it for heartbeats."""
        self.refused_orders = 0
        """Number of refused orders: for another epoch, or restores before `on_restore` is set."""
        self.on_restore: Callable[[RestoreBlocks], object] | None = None
        """Called in this thread with each restore order of this epoch; must not block."""
        self.on_leave: Callable[[LeaveWorld], object] | None = None
        """Called in this thread with the scheduler's order to leave the world, before the process
        exits."""
        self.awaits_report = False
        """The main thread joins a world, and may be about to report why it cannot: an exit waits
        `FLUSH_S` for that."""
        self._hello = hello
        self._has_place = False
        """This spare process has the place of the process before it."""
        self._clock = clock or SystemClock()
        self._end_process = end_process
        self._link: Dialer[ToRank] = Dialer(address, "rank", ToRank, self._clock, keys_dir=keys_dir)
        self._outgoing: deque[Message] = deque()
        self._thread = threading.Thread(target=self._run, name="scheduler_link", daemon=True)
        self._exit_code: int | None = None
        self._exit_deadline_s: float | None = None
        """When the process exits at the latest; None: no exit was requested."""
        self._epoch = 0
        self._rank = hello.rank
        self._heartbeat_at_s = 0.0

    def start(self) -> None:
        """Connect to the scheduler and receive orders until the process exits."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message; messages are sent in order. Does not block; thread-safe."""
        self._outgoing.append(message)
        if isinstance(message, RankFailed):
            self.awaits_report = False
        self._link.wake()

    def take_place(self) -> None:
        """Tell the scheduler that the process before this spare one has ended; thread-safe."""
        self._has_place = True
        self._link.wake()

    def wait_until_sent(self) -> None:
        """Wait until all queued messages have left, `FLUSH_S` at most.

        For a caller that will hold the interpreter's lock, so that this thread cannot send.
        """
        until_s = time.monotonic() + FLUSH_S
        while self._outgoing and time.monotonic() < until_s:
            time.sleep(0.002)

    def exit(self, exit_code: int) -> None:
        """Exit the process once all messages are acknowledged, after `FLUSH_S` at the latest."""
        self.request_exit(exit_code)
        self._thread.join(timeout=5 * FLUSH_S)
        self._end_process(exit_code)

    def request_exit(self, exit_code: int) -> None:
        """Make this thread exit the process as `exit` does; return without waiting for that."""
        self._exit_code = exit_code
        self._link.wake()

    def due_in_s(self) -> float:
        """Return how long `turn` has nothing to do if no message arrives, in seconds, 0 or more.

        Then a heartbeat must be sent, or the connection be kept alive, or the process exit.
        """
        now_s = self._clock.now()
        if self._exit_deadline_s is not None:
            return max(0.0, self._exit_deadline_s - now_s)
        if self._exit_code is not None:
            return 0.0
        return min(self._heartbeat_due_in_s(), self._link.due_in_s(now_s))

    def turn(self) -> bool:
        """Wait for messages, at most until the next heartbeat; handle them and send queued ones.

        Returns:
            False after the process was to exit; only seen where `end_process` returns, as in tests.
        """
        if self._exit_code is not None:
            return self._finish_exit(self._exit_code)
        for event in self._link.poll(self._heartbeat_due_in_s()):
            self._handle(event)
        if self._has_place and self._hello.spare:
            # In this thread, which also sends the hello.
            self._hello = structs.replace(self._hello, spare=False)
            self._outgoing.append(PlaceTaken(rank=self._hello.rank))
        self._send_heartbeat()
        self._flush()
        return True

    def _run(self) -> None:
        try:
            while self.turn():
                pass
        except Exception:  # noqa: BLE001 - the top of this thread
            _log.exception("scheduler_link_failed")
            self._end_process(limits.EXIT_SOFTWARE)

    def _handle(self, event: LinkEvent[ToRank]) -> None:
        match event:
            case Connected():
                if self._epoch == 0:
                    self._outgoing.append(self._hello)
            case Lost(cause=cause):
                if self._epoch:
                    _log.error("scheduler_lost", cause=cause)
                    self._exit_code = limits.EXIT_WORLD_LOST
            case Received(message=LeaveWorld() as message):
                self._handle_leave(message)
            case Received(message=JoinWorld() as message):
                self._handle_join(message)
            case Received(message=StepPlan() as message):
                if message.epoch == self._epoch:
                    self.arrivals_s.append(self._clock.now())
                    self.orders.put(message)
                else:
                    self._refuse("step_plan", message.epoch)
            case Received(message=RestoreBlocks() as message):
                if message.epoch == self._epoch and self.on_restore is not None:
                    self.on_restore(message)
                else:
                    self._refuse("restore_blocks", message.epoch)

    def _handle_join(self, message: JoinWorld) -> None:
        if self._epoch:
            # MLX cannot leave a distributed group: another world needs another process.
            _log.error("already_joined", epoch=self._epoch, ordered_epoch=message.epoch)
            self._exit_code = limits.EXIT_WORLD_LOST
            return
        self._epoch = message.epoch
        self._rank = message.rank
        self._link.silence_s = message.silence_s
        self.orders.put(message)

    def _handle_leave(self, message: LeaveWorld) -> None:
        if not self._epoch or message.epoch != self._epoch:
            self._refuse("leave_world", message.epoch)
            return
        _log.info("left_world", epoch=message.epoch, cause=message.cause, detail=message.detail)
        if self.on_leave is not None:
            self.on_leave(message)
        self._exit_code = limits.EXIT_WORLD_LOST

    def _refuse(self, order: str, epoch: int) -> None:
        self.refused_orders += 1
        _log.warning("order_refused", order=order, epoch=epoch, own_epoch=self._epoch)

    def _heartbeat_due_in_s(self) -> float:
        if not self._epoch:
            return HEARTBEAT_S
        return max(0.0, self._heartbeat_at_s + HEARTBEAT_S - self._clock.now())

    def _send_heartbeat(self) -> None:
        if self._epoch and self._heartbeat_due_in_s() <= 0.0:
            self._heartbeat_at_s = self._clock.now()
            self._outgoing.append(
                Heartbeat(
                    epoch=self._epoch,
                    rank=self._rank,
                    step_started=self.step_started,
                    step_finished=self.step_finished,
                )
            )
            if self.take_measurements is not None and (measured := self.take_measurements()):
                self._outgoing.append(measured)

    def _flush(self) -> None:
        while self._outgoing:
            try:
                self._link.send(self._outgoing[0], self._epoch)
            except (LinkFull, PeerUnknown):
                # LinkFull: try again later. PeerUnknown: a session begins soon, or `Lost` follows.
                return
            self._outgoing.popleft()

    def _finish_exit(self, exit_code: int) -> bool:
        """Send queued messages, wait briefly for their acknowledgement, and end the process."""
        now_s = self._clock.now()
        if self._exit_deadline_s is None:
            self._exit_deadline_s = now_s + FLUSH_S
        self._flush()
        is_busy = self._link.unacknowledged or self.awaits_report
        if is_busy and now_s < self._exit_deadline_s:
            # Messages that are received now are ignored.
            self._link.poll(self._exit_deadline_s - now_s)
            return True
        self._link.close(0.0)
        self._end_process(exit_code)
        return False
