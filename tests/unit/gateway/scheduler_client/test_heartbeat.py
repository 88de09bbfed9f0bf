"""Heartbeat of the link to the scheduler, which no work in the event loop may hold up."""

import asyncio
import threading
import time
from pathlib import Path

import msgspec
import pytest

from services.gateway.scheduler_client.scheduler_client import Events, SchedulerClient
from shared import limits
from shared.messages import ToScheduler
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
