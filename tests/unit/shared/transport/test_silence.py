"""A peer's silence: allowed, announced halfway, and its end."""

from pathlib import Path

import pytest

from shared import limits
from shared.clock import ManualClock
from shared.messages import ToGateway, ToScheduler
from shared.transport.links import Connected, Dialer, Listener, Lost, Quiet
from tests.support.waiting import wait_until
from tests.unit.shared.transport.link_polling import DEADLINE_S, Event


@pytest.fixture
def address(tmp_path: Path) -> str:
    """A free address on this machine."""
    return f"ipc://{tmp_path}/l.sock"


def test_session_ends_on_both_ends_after_silence_limit(address: str) -> None:
    """Both ends lose a peer from which nothing arrives within the limit."""
    clock = ManualClock()
    listener: Listener[ToScheduler] = Listener(address, ToScheduler, clock)
    dialer: Dialer[ToGateway] = Dialer(address, "gateway", ToGateway, clock)
    events: list[Event] = []

    def has_connected() -> bool:
        if dialer.is_connected:
            return True
        clock.advance(limits.HELLO_INTERVAL_S)
        events.extend(listener.poll(0.01))
        dialer.poll(0.01)
        return False

    wait_until(has_connected, DEADLINE_S, poll_s=0.0)
    for _ in range(5):  # Hellos that were sent before the welcome arrived.
        listener.poll(0.05)
        dialer.poll(0.05)
    clock.advance(limits.PEER_SILENCE_S + 0.1)
    events += listener.poll(0.0)
    dialler_events = dialer.poll(0.0)
    listener.close(0.0)
    dialer.close(0.0)

    assert [type(event) for event in events] == [Connected, Lost]
    assert [type(event) for event in dialler_events] == [Lost]


def test_peer_with_allowed_silence_is_lost_only_once_its_silence_counts_again(
    address: str,
) -> None:
    """A listener keeps a silent peer while its silence is allowed, and afterwards for the whole
    limit."""
    clock = ManualClock()
    listener: Listener[ToScheduler] = Listener(address, ToScheduler, clock)
    dialer: Dialer[ToGateway] = Dialer(address, "rank", ToGateway, clock)
    events: list[Event] = []

    def has_connected() -> bool:
        clock.advance(limits.HELLO_INTERVAL_S)
        events.extend(listener.poll(0.01))
        dialer.poll(0.01)
        return bool(events)

    wait_until(has_connected, DEADLINE_S, poll_s=0.0)
    (peer,) = listener.peers
    causes = []
    for is_allowed, seconds in ((True, 3.5), (False, 0.9), (False, 0.2)):
        listener.allow_silence(peer, is_allowed=is_allowed)
        clock.advance(seconds * limits.PEER_SILENCE_S)
        # Not even the system's queue is read: hellos that still arrive would count as a sign.
        found: list[Event] = []
        listener._maintain_sessions(clock.now(), found)
        causes.append([event.cause for event in found if isinstance(event, Lost)])
    listener.close(0.0)
    dialer.close(0.0)

    assert causes[:2] == [[], []]
    assert [cause[:6] for cause in causes[2]] == ["silent"]


def test_both_ends_warn_of_silence_before_they_lose_peer(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a limit of 4 s, owners are told of a silence of 3 s, which is logged; 6 s end the
    session."""
    clock = ManualClock()
    listener: Listener[ToScheduler] = Listener(address, ToScheduler, clock)
    dialer: Dialer[ToGateway] = Dialer(address, "gateway", ToGateway, clock)
    for link in (listener, dialer):
        link.silence_s = 4.0

    def has_connected() -> bool:
        clock.advance(limits.HELLO_INTERVAL_S)
        listener.poll(0.01)
        dialer.poll(0.01)
        return dialer.is_connected

    wait_until(has_connected, DEADLINE_S, poll_s=0.0)
    for _ in range(5):  # Hellos that were sent before the welcome arrived.
        listener.poll(0.05)
        dialer.poll(0.05)
    kinds = []
    for _ in range(2):
        clock.advance(3.0)
        # Neither end has read what the other has sent meanwhile.
        events: list[Event] = [*_maintain(listener, clock), *_maintain(dialer, clock)]
        kinds.append([type(event) for event in events])
    listener.close(0.0)
    dialer.close(0.0)

    assert kinds == [[Quiet, Quiet], [Lost, Lost]]
    assert [one.getMessage() for one in caplog.records].count("peer_silent") == 2


def _maintain(link: Listener[ToScheduler] | Dialer[ToGateway], clock: ManualClock) -> list[Event]:
    """Return the events of a poll for which nothing has arrived."""
    receive = link.socket.receive
    link.socket.receive = lambda count_max: iter(())  # type: ignore[method-assign]
    try:
        return list(link.poll(0.0))
    finally:
        link.socket.receive = receive  # type: ignore[method-assign]
