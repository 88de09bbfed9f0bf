"""A scheduler that dies or is replaced: open requests are kept, or end with an error."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.messages import RequestAccepted, token_ids
from tests.gateway import raw_client
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scheduler_link.concurrent_requests import (
    TOKENS,
    ConcurrentRequests,
    start_requests,
)
from tests.gateway.scripted_scheduler import (
    ScriptedScheduler,
    finished,
    generated,
    reply_after,
    reply_with,
)
from tests.support.waiting import wait_until


def _replace(gateway: RunningGateway, *, says_goodbye: bool, pause_s: float) -> None:
    """Stop the scheduler, and start another one after `pause_s` seconds."""
    before = gateway.scheduler
    gateway.scheduler.stop(says_goodbye=says_goodbye)
    time.sleep(pause_s)
    gateway.scheduler = ScriptedScheduler(before.address, reply=before.reply)


def _wait_new_tokens(gateway: RunningGateway, count: int) -> None:
    """Wait for this many more tokens; at least one per request if `count` is 3 per request."""
    expected = gateway.generation_tokens() + count
    wait_until(lambda: gateway.generation_tokens() >= expected)


@pytest.mark.proof
@pytest.mark.parametrize("says_goodbye", [True, False])
def test_responses_have_each_token_once_after_two_scheduler_restarts(
    model_folder: Path, tmp_path: Path, says_goodbye: bool
) -> None:
    """After two restarts every response, streamed or not, has each token once."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = reply_with(TOKENS, pause_s=0.1)
        requests = ConcurrentRequests(gateway)
        for _ in range(2):
            wait_until(lambda: len(gateway.scheduler.submitted) == 4)
            _wait_new_tokens(gateway, 12)
            _replace(gateway, says_goodbye=says_goodbye, pause_s=0.3)
        wait_until(lambda: len(gateway.scheduler.submitted) == 4)
        generated_before = [
            list(token_ids.unpack(request.generated)) for request in gateway.scheduler.submitted
        ]
        assert all(0 < len(tokens) < len(TOKENS) for tokens in generated_before)
        requests.check()
        assert all(TOKENS[: len(tokens)] == tokens for tokens in generated_before)


def test_request_aborted_while_scheduler_is_away_is_not_resubmitted(
    model_folder: Path, tmp_path: Path
) -> None:
    """A request whose client left while the scheduler was away is not submitted again."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = reply_after(TOKENS, threading.Event())
        requests = ConcurrentRequests(gateway, count=1)
        wait_until(lambda: len(gateway.scheduler.submitted) == 2)
        data = raw_client.encode_request({"stream": True})
        client = _open(gateway, data)
        wait_until(lambda: len(gateway.scheduler.submitted) == 3)
        address = gateway.scheduler.address
        assert b"lockstep_gateway_open_requests 3.0" in gateway.get("/metrics")[1]
        gateway.scheduler.stop(says_goodbye=False)
        client.close()
        wait_until(lambda: b"lockstep_gateway_open_requests 2.0" in gateway.get("/metrics")[1])
        gateway.scheduler = ScriptedScheduler(address, reply=reply_with(TOKENS, pause_s=0.01))
        requests.join()
        assert len(gateway.scheduler.submitted) == 2
        assert gateway.scheduler.aborts == []


def _open(gateway: RunningGateway, data: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", gateway.port))
    client.sendall(data)
    return client


@pytest.mark.proof
def test_request_ends_at_its_deadline_while_scheduler_is_away(
    model_folder: Path, tmp_path: Path
) -> None:
    """A request ends at its deadline with a 504 or an error event."""
    with RunningGateway.start(model_folder, tmp_path, request_timeout_s=1.0) as gateway:
        requests = start_requests(gateway, count=1, pause_s=0.2)
        _wait_new_tokens(gateway, 6)
        gateway.scheduler.stop(says_goodbye=False)
        requests.join()
        assert requests.bodies[0]["error"]["code"] == "deadline_exceeded"
        assert requests.streams[0][-1]["error"]["code"] == "deadline_exceeded"


@pytest.mark.proof
def test_open_requests_end_with_error_when_scheduler_stays_away(
    model_folder: Path, tmp_path: Path
) -> None:
    """After RECONNECT_WAIT_S_MAX a response is a 503 and a stream gets an error event."""
    prelude = "import services.gateway.completion.open_requests as r; r.RECONNECT_WAIT_S_MAX = 1.0"
    with RunningGateway.start(model_folder, tmp_path, prelude=prelude) as gateway:
        requests = start_requests(gateway, count=1, pause_s=0.2)
        _wait_new_tokens(gateway, 6)
        gateway.scheduler.stop()
        requests.join()
        assert requests.bodies[0]["error"]["message"] == "The scheduler has been away for too long."
        assert requests.streams[0][-1]["error"]["code"] == "unavailable"
        assert b"lockstep_gateway_open_requests 0.0" in gateway.get("/metrics")[1]


@pytest.mark.proof
def test_response_has_each_token_once_when_ended_scheduler_session_still_sends(
    model_folder: Path, tmp_path: Path
) -> None:
    """Tokens sent to the ended session do not arrive twice; each position comes once."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        requests = start_requests(gateway)
        _wait_new_tokens(gateway, 12)
        # The scheduler drops the session and continues the requests under the same names.
        gateway.scheduler.forget_sessions()
        wait_until(lambda: len(gateway.scheduler.submitted) == 8)
        requests.check()


def test_resumed_request_is_complete_when_new_scheduler_sends_only_its_end(
    model_folder: Path, tmp_path: Path
) -> None:
    """A new scheduler that finds `generated` complete sends only the end."""

    def reply(request: Any) -> Iterator[Any]:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        for position in range(request.generated_tokens, len(TOKENS)):
            yield generated(request, position, [TOKENS[position]])
        if not request.generated:
            yield 60.0
        yield finished(request, len(TOKENS), "stop")

    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = reply
        requests = ConcurrentRequests(gateway)
        wait_until(lambda: len(gateway.scheduler.submitted) == 4)
        wait_until(lambda: gateway.generation_tokens() == 4 * len(TOKENS))
        _replace(gateway, says_goodbye=False, pause_s=0.1)
        requests.check()
