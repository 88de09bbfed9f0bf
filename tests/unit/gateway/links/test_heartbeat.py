"""Link to the scheduler: no work may hold up its heartbeat, and it may hold up no other task."""

import asyncio
import threading
import time
from pathlib import Path

import msgspec
import pytest

from services.gateway.links import loop_dialer
from services.gateway.links.scheduler_client import Events, SchedulerClient
from shared import limits
from shared.identifiers import PeerId
from shared.messages import RequestAccepted, ToScheduler
from shared.transport.links import Connected, LinkEvent, Listener, Lost
from tests.support.waiting import wait_until

_SILENCE_S = 1.2
"""The limit of a peer's silence here: more than two keep-alives."""


def _keep_busy(seconds: float) -> None:
    """Let no other task of the event loop run."""
    time.sleep(seconds)


def test_scheduler_keeps_gateway_whose_event_loop_is_busy_for_longer_than_silence_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop does nothing else for 2.5 s, and the session lasts on both sides."""
    monkeypatch.setattr(limits, "PEER_SILENCE_S", _SILENCE_S)
    address = f"ipc://{tmp_path}/gateways.sock"
    listener: Listener[msgspec.Struct] = Listener(address, ToScheduler)
    stopping = threading.Event()
    heard: list[LinkEvent[msgspec.Struct]] = []

    def listen() -> None:
        while not stopping.is_set():
            heard.extend(listener.poll(0.05))
        listener.close(0.0)

    received: Events = []

    async def scenario() -> None:
        connected = asyncio.Event()

        def handle(events: Events) -> None:
            received.extend(events)
            if isinstance(events[0], Connected):
                connected.set()

        client = SchedulerClient(address)
        client.start(handle)
        async with asyncio.timeout(5.0):
            await connected.wait()
        _keep_busy(2.5)
        await asyncio.sleep(0.3)
        client.close()

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        asyncio.run(scenario())
        wait_until(
            lambda: any(isinstance(event, Lost) for event in heard), 5.0, failure=lambda: str(heard)
        )
    finally:
        stopping.set()
        thread.join()
    assert not [event for event in received if isinstance(event, Lost)]
    assert [event.cause for event in heard if isinstance(event, Lost)] == ["goodbye"]


def test_fewer_messages_are_handled_in_a_turn_while_each_takes_long(tmp_path: Path) -> None:
    """Expensive messages are handled one by one, with other tasks in between; cheap ones after
    them are handled together again."""
    address = f"ipc://{tmp_path}/gateways.sock"
    listener: Listener[msgspec.Struct] = Listener(address, ToScheduler)
    turns: list[int] = []

    async def scenario() -> None:
        connected, cost_s = asyncio.Event(), 2.0 * loop_dialer.TURN_S_MAX

        def handle(events: Events) -> None:
            if any(isinstance(event, Connected) for event in events):
                connected.set()
                return
            turns.append(len(events))
            _keep_busy(cost_s * len(events))

        async def receive(count: int) -> None:
            [peer] = peers
            for _ in range(count):
                listener.send(peer, RequestAccepted(request_id="r", queued_ahead=0))
            wanted = sum(turns) + count
            async with asyncio.timeout(20.0):
                while sum(turns) < wanted:
                    listener.poll(0.0)
                    await asyncio.sleep(0.001)

        client = SchedulerClient(address)
        client.start(handle)
        peers: set[PeerId] = set()
        async with asyncio.timeout(5.0):
            while not (connected.is_set() and peers):
                peers.update(one.peer for one in listener.poll(0.0) if isinstance(one, Connected))
                await asyncio.sleep(0.001)
        await receive(40)
        assert turns[-10:] == [1] * 10, turns
        cost_s = 0.0
        await receive(400)
        assert max(turns[-20:]) > 4, turns
        client.close()

    asyncio.run(scenario())
    listener.close(0.0)
