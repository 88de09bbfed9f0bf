"""A full scheduler queue: the gateway refuses by itself until the queue may have room."""

from collections.abc import Callable
from typing import Any

import pytest

from services.gateway.http.admission import FULL_MEMORY_S
from services.gateway.http.errors import ApiError
from shared.messages import (
    CachedPrefix,
    RequestAccepted,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestRejected,
)
from tests.unit.gateway.completion.open_requests_harness import OpenRequestsHarness

_DETAIL = "8 requests are waiting, which is the most allowed."


def _fill_queue(harness: OpenRequestsHarness) -> str:
    """Let one request wait and reject another one; return the name of the first."""
    waiting = harness.submit().request_id
    harness.receive(RequestAccepted(request_id=waiting, queued_ahead=7))
    refused = harness.submit().request_id
    harness.receive(
        RequestRejected(request_id=refused, cause="queue_full", detail=_DETAIL, retry_after_s=2.0)
    )
    return waiting


@pytest.fixture
def harness() -> OpenRequestsHarness:
    """A gateway's requests with a session to the scheduler."""
    opened = OpenRequestsHarness()
    opened.connect()
    return opened


def test_gateway_refuses_requests_without_submission_while_scheduler_queue_is_full(
    harness: OpenRequestsHarness,
) -> None:
    """Later requests get the scheduler's rejection, and nothing is submitted for them."""
    _fill_queue(harness)
    for _ in range(3):
        with pytest.raises(ApiError) as refused:
            harness.requests.check_queue("")
        error = refused.value
        assert (error.status, error.code, error.retry_after_s) == (429, "queue_full", 2.0)
        assert _DETAIL in str(error.body())
    assert len(harness.submitted()) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda harness, name: harness.receive(
            RequestAdmitted(request_id=name, cached=CachedPrefix())
        ),
        lambda harness, name: harness.receive(
            RequestFinished(
                request_id=name, finish_reason="abort", prompt_tokens=3, completion_tokens=0
            )
        ),
        lambda harness, name: harness.receive(
            RequestFailed(request_id=name, cause="queue_deadline", detail="Too long.")
        ),
        lambda harness, _: harness.lose(),
        lambda harness, _: harness.timers.advance(FULL_MEMORY_S),
    ],
    ids=["admitted", "finished", "failed", "lost", "time"],
)
def test_gateway_submits_requests_again_when_full_scheduler_queue_may_have_room(
    harness: OpenRequestsHarness, change: Callable[[OpenRequestsHarness, str], object]
) -> None:
    """After an end, an admission, a lost session or FULL_MEMORY_S the queue may have room."""
    change(harness, _fill_queue(harness))
    harness.requests.check_queue("")


def test_gateway_submits_next_request_after_client_of_waiting_request_disconnects(
    harness: OpenRequestsHarness,
) -> None:
    """The abort of a waiting request is sent before the next request, so the queue has room."""
    waiting = harness.submit()
    harness.receive(RequestAccepted(request_id=waiting.request_id, queued_ahead=7))
    refused = harness.submit().request_id
    harness.receive(RequestRejected(request_id=refused, cause="queue_full", detail=_DETAIL))
    harness.requests.close(waiting.generation)
    harness.requests.check_queue("")


def test_full_queue_of_one_tenant_does_not_refuse_another_tenant(
    harness: OpenRequestsHarness,
) -> None:
    """A rejection may be about one tenant's share, so another tenant's request is submitted."""
    _fill_queue(harness)
    harness.requests.check_queue("key other")
    with pytest.raises(ApiError):
        harness.requests.check_queue("")


@pytest.mark.parametrize(
    "cause", ["not_ready", "draining", "invalid", "too_long", "no_drafts", "deadline"]
)
def test_gateway_submits_next_request_unless_scheduler_rejected_one_for_full_queue(
    harness: OpenRequestsHarness, cause: Any
) -> None:
    """Only the cause queue_full keeps later requests from being submitted."""
    name = harness.submit().request_id
    harness.receive(RequestRejected(request_id=name, cause=cause, detail="No."))
    harness.requests.check_queue("")
