"""The policy by which a dialler reconnects and logs why."""

import pytest

from shared.clock import ManualClock
from shared.transport.reconnect import AFTER_REFUSAL_S, WITHOUT_SESSION_S, ReconnectPolicy

REFUSED = [("this host's key is not allowed there", True)]
CLOSED = [("the listener has another key", False)]


def _policy(clock: ManualClock) -> ReconnectPolicy:
    return ReconnectPolicy("tcp://192.0.2.1:5555", "a public key", clock)


def test_dialer_retries_refused_handshake_once_after_one_second() -> None:
    """ZeroMQ does not retry a refused handshake, so the policy does."""
    clock = ManualClock()
    policy = _policy(clock)

    assert not policy.is_due(REFUSED)
    clock.advance(AFTER_REFUSAL_S - 0.01)
    assert not policy.is_due([])
    clock.advance(0.02)

    assert policy.is_due([])
    assert not policy.is_due([])
    assert policy.failures == 1


def test_dialer_lets_zeromq_redial_closed_connection_before_it_reconnects_itself() -> None:
    """ZeroMQ redials a listener that closes connections; the policy does so only after a long
    time."""
    clock = ManualClock()
    policy = _policy(clock)

    for _ in range(5):
        clock.advance(AFTER_REFUSAL_S)
        assert not policy.is_due(CLOSED)
    clock.advance(WITHOUT_SESSION_S)

    assert policy.is_due([])


def test_dialer_replaces_connection_of_silent_session_at_once() -> None:
    """After a session that ended otherwise, the connection gets time for a new hello."""
    clock = ManualClock()
    policy = _policy(clock)

    policy.session_lost()
    assert not policy.is_due([])
    policy.session_lost(is_silent=True)

    assert policy.is_due([])


def test_dialer_logs_connection_failures_at_most_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A refusal is logged at once, a closed connection at the third time in a row."""
    clock = ManualClock()
    policy = _policy(clock)
    for _ in range(2):
        policy.is_due(CLOSED)
    assert caplog.records == []
    policy.session_lost()
    for _ in range(2):
        policy.is_due(CLOSED)
    assert caplog.records == []

    for _ in range(10):
        policy.is_due(CLOSED)
        policy.is_due(REFUSED)

    (record,) = caplog.records
    fields = record.__dict__["fields"]
    assert fields["public_key"] == "a public key"
    assert fields["link"] == "tcp://192.0.2.1:5555"
    assert policy.failures == 24
