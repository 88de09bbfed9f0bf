"""A scheduler that dies or hands over: open requests are kept, and say so when they end."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.messages import RequestAccepted
from tests.gateway import raw_client
from tests.gateway.concurrent_requests import TOKENS, Asking, until
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import ScriptedScheduler, finished, generated, hold, say


def _replace(gateway: RunningGateway, *, says_goodbye: bool, pause_s: float) -> None:
    """End the scheduler, and start another one after a while."""
    before = gateway.scheduler
    gateway.scheduler.stop(says_goodbye=says_goodbye)
    time.sleep(pause_s)
    gateway.scheduler = ScriptedScheduler(before.address, reply=before.reply)


def _wait_tokens(gateway: RunningGateway, more: int) -> None:
    """Wait until so many more tokens have arrived: three for each request are one at least."""
    enough = gateway.generation_tokens() + more
    until(lambda: gateway.generation_tokens() >= enough)


@pytest.mark.proof
@pytest.mark.parametrize("says_goodbye", [True, False])
def test_nobody_notices_a_new_scheduler(
    model_folder: Path, tmp_path: Path, says_goodbye: bool
) -> None:
    """Part 2: killed or handed over twice, streamed and whole answers have each token once."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = say(TOKENS, pause_s=0.1)
        asking = Asking(gateway)
        for _ in range(2):
            until(lambda: len(gateway.scheduler.orders) == 4)
            _wait_tokens(gateway, 12)
            _replace(gateway, says_goodbye=says_goodbye, pause_s=0.3)
        until(lambda: len(gateway.scheduler.orders) == 4)
        generated_before = [order.generated for order in gateway.scheduler.orders]
        assert all(0 < len(tokens) < len(TOKENS) for tokens in generated_before)
        asking.check()
        assert all(TOKENS[: len(tokens)] == tokens for tokens in generated_before)


def test_what_ended_or_left_meanwhile_is_not_offered(model_folder: Path, tmp_path: Path) -> None:
    """A stop string's end is not confirmed any more, a client leaves: neither comes back."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = hold(TOKENS, threading.Event())
        asking = Asking(gateway, count=1)
        until(lambda: len(gateway.scheduler.orders) == 2)
        leaving = raw_client.request({"stream": True})
        client = _open(gateway, leaving)
        until(lambda: len(gateway.scheduler.orders) == 3)
        address = gateway.scheduler.address
        assert b"lockstep_gateway_open_requests 3.0" in gateway.get("/metrics")[1]
        gateway.scheduler.stop(says_goodbye=False)
        client.close()
        until(lambda: b"lockstep_gateway_open_requests 2.0" in gateway.get("/metrics")[1])
        gateway.scheduler = ScriptedScheduler(address, reply=say(TOKENS, pause_s=0.01))
        asking.join()
        assert len(gateway.scheduler.orders) == 2
        assert gateway.scheduler.aborts == []


def _open(gateway: RunningGateway, data: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", gateway.port))
    client.sendall(data)
    return client


@pytest.mark.proof
def test_the_deadline_holds_while_the_scheduler_is_away(model_folder: Path, tmp_path: Path) -> None:
    """A request that nobody serves ends at its deadline: 504, or an error event."""
    with RunningGateway.start(model_folder, tmp_path, request_timeout_s=1.0) as gateway:
        gateway.scheduler.reply = say(TOKENS, pause_s=0.2)
        asking = Asking(gateway, count=1)
        until(lambda: len(gateway.scheduler.orders) == 2)
        _wait_tokens(gateway, 6)
        gateway.scheduler.stop(says_goodbye=False)
        asking.join()
        assert asking.answers[0]["error"]["code"] == "deadline_exceeded"
        assert asking.streams[0][-1]["error"]["code"] == "deadline_exceeded"


@pytest.mark.proof
def test_a_scheduler_that_stays_away_ends_open_requests(model_folder: Path, tmp_path: Path) -> None:
    """After RECONNECT_WAIT_S_MAX whole answers are a 503 and streams get an error event."""
    prelude = "import services.gateway.completion.open_requests as r; r.RECONNECT_WAIT_S_MAX = 1.0"
    with RunningGateway.start(model_folder, tmp_path, prelude=prelude) as gateway:
        gateway.scheduler.reply = say(TOKENS, pause_s=0.2)
        asking = Asking(gateway, count=1)
        until(lambda: len(gateway.scheduler.orders) == 2)
        _wait_tokens(gateway, 6)
        gateway.scheduler.stop()
        asking.join()
        assert asking.answers[0]["error"]["message"] == "The scheduler has been away for too long."
        assert asking.streams[0][-1]["error"]["code"] == "unavailable"
        assert b"lockstep_gateway_open_requests 0.0" in gateway.get("/metrics")[1]


@pytest.mark.proof
def test_tokens_of_the_session_before_are_nobodys(model_folder: Path, tmp_path: Path) -> None:
    """Sent to the session that ended, they never arrive twice: each position once, no error."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = say(TOKENS, pause_s=0.1)
        asking = Asking(gateway)
        until(lambda: len(gateway.scheduler.orders) == 4)
        _wait_tokens(gateway, 12)
        # It forgets the gateway's session but goes on with its requests under the same names.
        gateway.scheduler.forget_sessions()
        until(lambda: len(gateway.scheduler.orders) == 8)
        asking.check()


def test_a_resumed_request_may_end_at_once(model_folder: Path, tmp_path: Path) -> None:
    """A new scheduler sees that `generated` is complete, and says the end and nothing else."""

    def reply(request: Any) -> Iterator[Any]:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        for place in range(len(request.generated), len(TOKENS)):
            yield generated(request, place, [TOKENS[place]])
        if not request.generated:
            yield 60.0
        yield finished(request, len(TOKENS), "stop")

    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = reply
        asking = Asking(gateway)
        until(lambda: len(gateway.scheduler.orders) == 4)
        until(lambda: gateway.generation_tokens() == 4 * len(TOKENS))
        _replace(gateway, says_goodbye=False, pause_s=0.1)
        asking.check()
