"""The scheduler link with a real listener as its scheduler; a recorder stands for `os._exit`."""

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.rank_worker import scheduler_link
from services.rank_worker.scheduler_link import SchedulerLink
from shared import limits
from shared.clock import SystemClock
from shared.messages import (
    Heartbeat,
    JoinWorld,
    LeaveWorld,
    Message,
    RankFailed,
    RankHello,
    RankLoading,
    RestoreBlocks,
    RestoreItem,
    StepPlan,
    ToScheduler,
)
from shared.transport.links import Connected, Listener, Received
from tests.orders import join_order

HELLO = RankHello(
    rank=-1,
    host="h",
    pid=1,
    data_address="127.0.0.1:1",
    launched=False,
    device="cpu",
    mlx_version="0",
    memory_bytes=1,
)


class Pair:
    """A scheduler's end and a rank's scheduler link; `ended` holds the exit codes."""

    def __init__(self, folder: Path) -> None:
        address = f"ipc://{folder}/r.sock"
        self.link: Listener[Any] = Listener(address, ToScheduler)
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.rank_link = SchedulerLink(address, HELLO, end_process=self.ended.put)
        self.rank_link.start()
        self.heard: list[Message] = []
        self.connected = 0
        self.until(lambda: bool(self.heard))
        self.peer = self.link.peers[0]

    def until(self, condition: Callable[[], bool], limit_s: float = 30.0) -> None:
        """Hear the rank until the condition holds."""
        clock = SystemClock()
        end_s = clock.now() + limit_s
        while not condition():
            assert clock.now() < end_s, f"heard {self.heard}"
            for event in self.link.poll(0.02):
                if isinstance(event, Received):
                    self.heard.append(event.message)
                self.connected += isinstance(event, Connected)

    def order(self, *messages: Message) -> None:
        """Send orders to the rank."""
        for message in messages:
            self.link.send(self.peer, message, 3)

    def end_code(self) -> int:
        """Return the code that the process would have ended with."""
        codes: list[int] = []

        def take() -> bool:
            if not self.ended.empty():
                codes.append(self.ended.get())
            return bool(codes)

        self.until(take)
        return codes[0]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
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


def test_it_says_hello_first(pair: Pair) -> None:
    """The first message of a rank is its hello, and without a world there is no heartbeat."""
    assert pair.heard == [HELLO]


def test_it_says_hello_again_when_the_scheduler_comes_back(pair: Pair) -> None:
    """Before it belongs to a world, a rank survives its scheduler and greets the next one."""
    pair.link.drop(pair.peer)
    pair.until(lambda: len(pair.heard) == 2)

    assert pair.heard == [HELLO, HELLO]
    assert pair.ended.empty()


def test_orders_of_its_epoch_reach_the_main_thread_in_order(pair: Pair) -> None:
    """What the main thread takes is the join and then the plans, as they were sent."""
    sent = [_join(3), _plan(3, 1), _plan(3, 2)]
    pair.order(*sent)

    assert [pair.rank_link.orders.get(timeout=30) for _ in sent] == sent


def test_orders_of_another_epoch_are_refused_and_counted(pair: Pair) -> None:
    """A plan before any world, a plan and a goodbye of an old epoch: none does anything."""
    pair.order(_plan(2, 1), _join(3), _plan(2, 1), LeaveWorld(epoch=2, detail=""), _plan(3, 1))

    assert [pair.rank_link.orders.get(timeout=30) for _ in range(2)] == [_join(3), _plan(3, 1)]
    assert pair.rank_link.refused_orders == 3
    assert pair.ended.empty()


def test_restores_do_not_wait_for_the_main_thread(pair: Pair) -> None:
    """A restore of its epoch goes to who takes restores, past the plans that are queued."""
    taken: queue.SimpleQueue[RestoreBlocks] = queue.SimpleQueue()
    pair.rank_link.on_restore = taken.put
    pair.order(_join(3), _plan(3, 1), _restore(3, 1), _plan(3, 2), _restore(3, 2))

    assert [taken.get(timeout=30) for _ in range(2)] == [_restore(3, 1), _restore(3, 2)]
    assert [pair.rank_link.orders.get(timeout=30) for _ in range(3)] == [
        _join(3),
        _plan(3, 1),
        _plan(3, 2),
    ]


def test_restores_that_nobody_takes_are_refused_and_counted(pair: Pair) -> None:
    """Before there is a model, and of another epoch: refused, and the rank lives on."""
    taken: list[RestoreBlocks] = []
    pair.order(_restore(3, 1), _join(3), _restore(3, 1), _plan(3, 1))
    assert [pair.rank_link.orders.get(timeout=30) for _ in range(2)] == [_join(3), _plan(3, 1)]
    pair.rank_link.on_restore = taken.append
    pair.order(_restore(2, 2), _plan(3, 2), _restore(3, 3), _plan(3, 3))
    assert [pair.rank_link.orders.get(timeout=30) for _ in range(2)] == [_plan(3, 2), _plan(3, 3)]

    assert taken == [_restore(3, 3)]
    assert pair.rank_link.refused_orders == 3
    assert pair.ended.empty()


def test_a_second_world_ends_the_process(pair: Pair) -> None:
    """A process serves one epoch."""
    pair.order(_join(3), _join(4))
    assert pair.end_code() == limits.EXIT_WORLD_LOST


def test_leaving_ends_the_process(pair: Pair) -> None:
    """LeaveWorld of its own epoch ends the process with a code that is not 0."""
    pair.order(_join(3), LeaveWorld(epoch=3, detail="over"))
    assert pair.end_code() == limits.EXIT_WORLD_LOST


def test_who_leaves_hears_why_first(pair: Pair) -> None:
    """What the scheduler says of the epoch's end is heard before the process is gone."""
    said: queue.SimpleQueue[LeaveWorld] = queue.SimpleQueue()
    pair.rank_link.on_leave = said.put
    pair.order(_join(3), LeaveWorld(epoch=2, detail="old"), LeaveWorld(epoch=3, detail="why"))

    assert pair.end_code() == limits.EXIT_WORLD_LOST
    assert said.get(timeout=0).detail == "why"
    assert said.empty()


def test_a_lost_scheduler_ends_a_rank_of_a_world(pair: Pair) -> None:
    """Nobody decides any more, so the rank ends."""
    pair.order(_join(3))
    pair.rank_link.orders.get(timeout=30)
    pair.link.drop(pair.peer)
    assert pair.end_code() == limits.EXIT_WORLD_LOST


def test_heartbeats_say_which_step_was_reached(pair: Pair) -> None:
    """In a world the progress of the main thread is told, from the first moment on."""
    pair.rank_link.step_started, pair.rank_link.step_finished = 7, 6
    pair.order(_join(3))
    pair.until(lambda: len(pair.heard) >= 2)

    assert pair.heard[1] == Heartbeat(epoch=3, rank=2, step_started=7, step_finished=6)


def test_a_message_leaves_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the main thread says does not wait for the next heartbeat."""
    monkeypatch.setattr(scheduler_link, "HEARTBEAT_S", 60.0)
    pair.order(_join(3))
    pair.until(lambda: len(pair.heard) == 2)
    clock = SystemClock()
    before_s = clock.now()
    pair.rank_link.send(RankLoading(stage="loading", loaded=0.5))
    pair.until(lambda: len(pair.heard) == 3)

    assert pair.heard[2] == RankLoading(stage="loading", loaded=0.5)
    assert clock.now() - before_s < scheduler_link.HEARTBEAT_S / 2


def test_it_can_be_driven_without_its_thread(tmp_path: Path) -> None:
    """Turn by turn it does the same, and says itself when the next turn is due: how it is
    simulated."""
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


def test_last_words_arrive(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said right before the end still reaches the scheduler."""
    # A busy machine may need long. To wait in vain for so long is too long for this test.
    monkeypatch.setattr(scheduler_link, "FLUSH_S", 60.0)
    pair.order(_join(3))
    pair.rank_link.orders.get(timeout=30)
    failed = RankFailed(rank=2, epoch=3, detail="no such model", permanent=True)

    def fail() -> None:
        pair.rank_link.send(failed)
        pair.rank_link.exit(limits.EXIT_CONFIG)

    thread = threading.Thread(target=fail)
    thread.start()
    code = pair.end_code()
    thread.join()
    pair.until(lambda: failed in pair.heard)

    assert code == limits.EXIT_CONFIG
