"""When a dialler connects anew, and when it says why."""

import pytest

from shared.clock import ManualClock
from shared.log import Log
from shared.transport.reconnect import AFTER_REFUSAL_S, WITHOUT_SESSION_S, ReconnectPolicy

REFUSED = [("this host's key is not allowed there", True)]
HUNG_UP = [("the listener has another key", False)]


def _policy(clock: ManualClock) -> ReconnectPolicy:
    return ReconnectPolicy("tcp://192.0.2.1:5555", "a public key", clock, Log("link"))


def test_a_refused_handshake_is_tried_again_soon() -> None:
    """ZeroMQ gave up: one second later, not before, it is dialled again, and once only."""
    clock = ManualClock()
    policy = _policy(clock)

    assert not policy.is_due(REFUSED)
    clock.advance(AFTER_REFUSAL_S - 0.01)
    assert not policy.is_due([])
    clock.advance(0.02)

    assert policy.is_due([])
    assert not policy.is_due([])
    assert policy.failures == 1


def test_what_zeromq_tries_again_itself_is_left_to_it() -> None:
    """A listener that hangs up is dialled again by ZeroMQ; only after long do we do it too."""
    clock = ManualClock()
    policy = _policy(clock)

    for _ in range(5):
        clock.advance(AFTER_REFUSAL_S)
        assert not policy.is_due(HUNG_UP)
    clock.advance(WITHOUT_SESSION_S)

    assert policy.is_due([])


def test_a_silent_connection_is_replaced_at_once() -> None:
    """When a session ends in silence its connection is no good; else it gets time for a hello."""
    clock = ManualClock()
    policy = _policy(clock)

    policy.session_lost()
    assert not policy.is_due([])
    policy.session_lost(is_silent=True)

    assert policy.is_due([])


def test_complaints_are_few(caplog: pytest.LogCaptureFixture) -> None:
    """A refusal is said at once, hanging up at the third time in a row; both once a minute."""
    clock = ManualClock()
    policy = _policy(clock)
    for _ in range(2):
        policy.is_due(HUNG_UP)
    assert caplog.records == []
    policy.session_lost()
    for _ in range(2):
        policy.is_due(HUNG_UP)
    assert caplog.records == []

    for _ in range(10):
        policy.is_due(HUNG_UP)
        policy.is_due(REFUSED)

    (record,) = caplog.records
    fields = record.__dict__["fields"]
    assert fields["public_key"] == "a public key"
    assert fields["link"] == "tcp://192.0.2.1:5555"
    assert policy.failures == 24
