"""Scheduler link of a rank with a real listener; a recorder replaces `os._exit`."""

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.rank_worker import main, scheduler_link
from services.rank_worker.scheduler_link import SchedulerLink
from shared import limits
from shared.clock import SystemClock
from shared.messages import (
    Heartbeat,
    JoinWorld,
    LeaveWorld,
    Message,
    PlaceTaken,
    RankFailed,
    RankLoading,
    RestoreBlocks,
    RestoreItem,
    StepPlan,
    ToScheduler,
)
from shared.os import lifeline
from shared.transport.links import Connected, Listener, Received
from tests.support.orders import join_order, rank_hello
from tests.support.waiting import wait_until

HELLO = rank_hello(-1, data_address="127.0.0.1:1")


class LinkPair:
    """Listener of a scheduler and the scheduler link of a rank; `ended` has the exit codes."""

    def __init__(self, folder: Path) -> None:
        address = f"ipc://{folder}/r.sock"
        self.link: Listener[Any] = Listener(address, ToScheduler)
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.rank_link = SchedulerLink(address, HELLO, end_process=self.ended.put)
        self.rank_link.start()
        self.received: list[Message] = []
        self.connected = 0
        self.poll_until(lambda: bool(self.received))
        self.peer = self.link.peers[0]

    def poll_until(self, condition: Callable[[], bool], limit_s: float = 30.0) -> None:
        """Receive messages of the rank until the condition holds."""

        def holds() -> bool:
            if condition():
                return True
            for event in self.link.poll(0.02):
                if isinstance(event, Received):
                    self.received.append(event.message)
                self.connected += isinstance(event, Connected)
            return False

        wait_until(holds, limit_s, poll_s=0.0, failure=lambda: f"received {self.received}")

    def send(self, *messages: Message) -> None:
        """Send messages to the rank."""
        for message in messages:
            self.link.send(self.peer, message, 3)

    def exit_code(self) -> int:
        """Return the code with which the process would have ended."""
        codes: list[int] = []

        def take() -> bool:
            if not self.ended.empty():
                codes.append(self.ended.get())
            return bool(codes)

        self.poll_until(take)
        return codes[0]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[LinkPair]:
    made = LinkPair(tmp_path)
    yield made
    made.rank_link.exit(0)
    made.link.close(0.0)


def _join(epoch: int) -> JoinWorld:
    return join_order(2, 3, epoch=epoch, synchronization="independent")


def _plan(epoch: int, step_id: int) -> StepPlan:
    return StepPlan(epoch=epoch, step_id=step_id, deadline_s=1.0, row_count=0, row_tokens=0)


def _restore(epoch: int, restore_id: int) -> RestoreBlocks:
    return RestoreBlocks(
        epoch=epoch,
        restore_id=restore_id,
        namespace="00",
        items=[RestoreItem(block=bytes(32), length=16)],
        deadline_s=1.0,
    )


def test_rank_sends_hello_first_and_no_heartbeat_before_joining(pair: LinkPair) -> None:
    """The first message of a rank is its hello; without a world it sends no heartbeat."""
    assert pair.received == [HELLO]


def test_wait_until_sent_returns_when_messages_have_left_link(pair: LinkPair) -> None:
    """A caller that then holds the interpreter's lock knows that its messages are on their way."""
    for fraction in (0.1, 0.2, 0.3):
        pair.rank_link.send(RankLoading(stage="init", loaded=fraction))
    pair.rank_link.wait_until_sent()
    assert not pair.rank_link._outgoing

    pair.poll_until(lambda: len(pair.received) == 4)


def test_joining_rank_that_must_leave_sends_cause_that_it_is_about_to_report(
    pair: LinkPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose init has just failed, but that is told to leave first, still reports why."""
    monkeypatch.setattr(scheduler_link, "FLUSH_S", 10.0)
    pair.send(_join(3))
    assert isinstance(pair.rank_link.orders.get(timeout=30.0), JoinWorld)
    pair.rank_link.awaits_report = True
    pair.send(LeaveWorld(epoch=3, detail="a symptom"))
    wait_until(lambda: pair.rank_link._exit_deadline_s is not None, 30.0)
    assert pair.ended.empty()
    failed = RankFailed(rank=2, epoch=3, detail="the cause", permanent=False)
    pair.rank_link.send(failed)

    assert pair.exit_code() == limits.EXIT_WORLD_LOST
    assert failed in pair.received


def test_rank_without_world_sends_hello_again_after_reconnect(pair: LinkPair) -> None:
    """A rank without a world survives the loss of the scheduler and sends its hello again."""
    pair.link.drop(pair.peer)
    pair.poll_until(lambda: len(pair.received) == 2)

    assert pair.received == [HELLO, HELLO]
    assert pair.ended.empty()


def test_spare_that_takes_place_says_so_and_is_no_spare_after_reconnect(pair: LinkPair) -> None:
    """The scheduler learns at once that the process before it has ended, and a later hello is that
    of a rank."""
    pair.rank_link._hello = msgspec.structs.replace(HELLO, spare=True)
    pair.rank_link.take_place()
    pair.poll_until(lambda: len(pair.received) == 2)
    pair.link.drop(pair.peer)
    pair.poll_until(lambda: len(pair.received) == 3)

    assert pair.received == [HELLO, PlaceTaken(rank=HELLO.rank), HELLO]


def test_spare_whose_files_have_changed_ends_instead_of_taking_place(
    pair: LinkPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that runs old code must not become the rank that a restart was to renew."""
    monkeypatch.setattr(lifeline, "wait_for_turn", lambda: None)
    main._take_place(pair.rank_link, "another build", lambda: None)

    assert pair.exit_code() == limits.EXIT_WORLD_LOST
    assert not any(isinstance(one, PlaceTaken) for one in pair.received)


def test_join_and_plans_reach_main_thread_in_sent_order(pair: LinkPair) -> None:
    """The main thread gets the join and then the plans in the order in which they were sent."""
    sent = [_join(3), _plan(3, 1), _plan(3, 2)]
    pair.send(*sent)

    assert [pair.rank_link.orders.get(timeout=30) for _ in sent] == sent


def test_orders_of_other_epoch_are_refused_and_counted(pair: LinkPair) -> None:
    """Orders before the join or of another epoch are refused and counted."""
    pair.send(_plan(2, 1), _join(3), _plan(2, 1), LeaveWorld(epoch=2, detail=""), _plan(3, 1))

    assert [pair.rank_link.orders.get(timeout=30) for _ in range(2)] == [_join(3), _plan(3, 1)]
    assert pair.rank_link.refused_orders == 3
    assert pair.ended.empty()


def test_restore_order_reaches_callback_before_queued_plans(pair: LinkPair) -> None:
    """Restores of the own epoch reach their callback before the queued plans."""
    taken: queue.SimpleQueue[RestoreBlocks] = queue.SimpleQueue()
    pair.rank_link.on_restore = taken.put
    pair.send(_join(3), _plan(3, 1), _restore(3, 1), _plan(3, 2), _restore(3, 2))

    assert [taken.get(timeout=30) for _ in range(2)] == [_restore(3, 1), _restore(3, 2)]
    assert [pair.rank_link.orders.get(timeout=30) for _ in range(3)] == [
        _join(3),
        _plan(3, 1),
        _plan(3, 2),
    ]


def test_restore_order_without_callback_is_refused_and_counted(pair: LinkPair) -> None:
    """Restores before a callback is set or of another epoch are refused and counted."""
    taken: list[RestoreBlocks] = []
    pair.send(_restore(3, 1), _join(3), _restore(3, 1), _plan(3, 1))
    assert [pair.rank_link.orders.get(timeout=30) for _ in range(2)] == [_join(3), _plan(3, 1)]
    pair.rank_link.on_restore = taken.append
    pair.send(_restore(2, 2), _plan(3, 2), _restore(3, 3), _plan(3, 3))
    assert [pair.rank_link.orders.get(timeout=30) for _ in range(2)] == [_plan(3, 2), _plan(3, 3)]

    assert taken == [_restore(3, 3)]
    assert pair.rank_link.refused_orders == 3
    assert pair.ended.empty()


def test_second_join_order_ends_rank_process(pair: LinkPair) -> None:
    """A process serves one epoch; a second join ends it."""
    pair.send(_join(3), _join(4))
    assert pair.exit_code() == limits.EXIT_WORLD_LOST


def test_leave_world_order_ends_process_with_exit_world_lost(pair: LinkPair) -> None:
    """LeaveWorld of the own epoch ends the process with EXIT_WORLD_LOST."""
    pair.send(_join(3), LeaveWorld(epoch=3, detail="over"))
    assert pair.exit_code() == limits.EXIT_WORLD_LOST


def test_leave_callback_gets_reason_before_process_exits(pair: LinkPair) -> None:
    """The callback gets the reason to leave before the process ends."""
    said: queue.SimpleQueue[LeaveWorld] = queue.SimpleQueue()
    pair.rank_link.on_leave = said.put
    pair.send(_join(3), LeaveWorld(epoch=2, detail="old"), LeaveWorld(epoch=3, detail="why"))

    assert pair.exit_code() == limits.EXIT_WORLD_LOST
    assert said.get(timeout=0).detail == "why"
    assert said.empty()


def test_rank_in_world_ends_when_scheduler_link_is_lost(pair: LinkPair) -> None:
    """A rank of a world ends when the link to the scheduler is lost."""
    pair.send(_join(3))
    pair.rank_link.orders.get(timeout=30)
    pair.link.drop(pair.peer)
    assert pair.exit_code() == limits.EXIT_WORLD_LOST


def test_heartbeats_in_world_contain_last_started_and_finished_step(pair: LinkPair) -> None:
    """Heartbeats of a rank in a world contain the last started and finished steps."""
    pair.rank_link.step_started, pair.rank_link.step_finished = 7, 6
    pair.send(_join(3))
    pair.poll_until(lambda: len(pair.received) >= 2)

    assert pair.received[1] == Heartbeat(epoch=3, rank=2, step_started=7, step_finished=6)


def test_message_of_main_thread_does_not_wait_for_next_heartbeat(
    pair: LinkPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of the main thread does not wait for the next heartbeat."""
    monkeypatch.setattr(scheduler_link, "HEARTBEAT_S", 60.0)
    pair.send(_join(3))
    pair.poll_until(lambda: len(pair.received) == 2)
    clock = SystemClock()
    before_s = clock.now()
    pair.rank_link.send(RankLoading(stage="loading", loaded=0.5))
    pair.poll_until(lambda: len(pair.received) == 3)

    assert pair.received[2] == RankLoading(stage="loading", loaded=0.5)
    assert clock.now() - before_s < scheduler_link.HEARTBEAT_S / 2


def test_scheduler_link_run_without_thread_sends_hello_and_last_message_before_exit(
    tmp_path: Path,
) -> None:
    """A link that is driven turn by turn, without a thread, sends its hello, messages and last
    message before the exit."""
    address = f"ipc://{tmp_path}/r.sock"
    link: Listener[Any] = Listener(address, ToScheduler)
    codes: list[int] = []
    driven = SchedulerLink(address, HELLO, end_process=codes.append)
    said: list[Message] = []

    def turns(condition: Callable[[], bool]) -> None:
        for _ in range(500):
            if condition():
                return
            assert 0.0 <= driven.due_in_s() <= 1.0
            if not codes:
                driven.turn()
            said.extend(one.message for one in link.poll(0.01) if isinstance(one, Received))
        raise AssertionError(said)

    try:
        turns(lambda: said == [HELLO])
        link.send(link.peers[0], _join(3), 3)
        turns(lambda: not driven.orders.empty())
        driven.send(RankLoading(stage="loading", loaded=0.5))
        driven.request_exit(limits.EXIT_WORLD_LOST)
        turns(lambda: codes == [limits.EXIT_WORLD_LOST])
    finally:
        link.close(0.0)

    assert said[-1] == RankLoading(stage="loading", loaded=0.5)


def test_message_sent_directly_before_exit_reaches_scheduler(
    pair: LinkPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message sent directly before the exit reaches the scheduler."""
    # A busy machine is slow; the test fails before this limit if the message is lost.
    monkeypatch.setattr(scheduler_link, "FLUSH_S", 60.0)
    pair.send(_join(3))
    pair.rank_link.orders.get(timeout=30)
    failed = RankFailed(rank=2, epoch=3, detail="no such model", permanent=True)

    def fail() -> None:
        pair.rank_link.send(failed)
        pair.rank_link.exit(limits.EXIT_CONFIG)

    thread = threading.Thread(target=fail)
    thread.start()
    code = pair.exit_code()
    thread.join()
    pair.poll_until(lambda: failed in pair.received)

    assert code == limits.EXIT_CONFIG
