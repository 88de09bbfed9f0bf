"""A queue that was full is full until something moves: told at the door, and never for long."""

from collections.abc import Callable

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
from tests.unit.gateway.completion.open_requests_harness import OpenRequestsByHand

_DETAIL = "8 requests are waiting, which is the most allowed."


def _full(hand: OpenRequestsByHand) -> str:
    """Let one request wait and another one be refused; return the name of the first."""
    waiting = hand.open().request_id
    hand.hear(RequestAccepted(request_id=waiting, queued_ahead=7))
    refused = hand.open().request_id
    hand.hear(
        RequestRejected(request_id=refused, cause="queue_full", detail=_DETAIL, retry_after_s=2.0)
    )
    return waiting


@pytest.fixture
def hand() -> OpenRequestsByHand:
    """A gateway's requests with a session to the scheduler."""
    by_hand = OpenRequestsByHand()
    by_hand.connect()
    return by_hand


def test_who_comes_next_is_told_what_the_scheduler_said(hand: OpenRequestsByHand) -> None:
    """The same answer, as often as asked, and nothing is sent for it."""
    _full(hand)
    for _ in range(3):
        with pytest.raises(ApiError) as refused:
            hand.requests.check_queue()
        error = refused.value
        assert (error.status, error.code, error.retry_after_s) == (429, "queue_full", 2.0)
        assert _DETAIL in str(error.body())
    assert len(hand.submits()) == 2


@pytest.mark.parametrize(
    "move",
    [
        lambda hand, name: hand.hear(RequestAdmitted(request_id=name, cached=CachedPrefix())),
        lambda hand, name: hand.hear(
            RequestFinished(
                request_id=name, finish_reason="abort", prompt_tokens=3, completion_tokens=0
            )
        ),
        lambda hand, name: hand.hear(
            RequestFailed(request_id=name, cause="queue_deadline", detail="Too long.")
        ),
        lambda hand, _: hand.lose(),
        lambda hand, _: hand.timers.advance(FULL_MEMORY_S),
    ],
    ids=["admitted", "finished", "failed", "lost", "time"],
)
def test_the_scheduler_is_asked_once_something_moves(
    hand: OpenRequestsByHand, move: Callable[[OpenRequestsByHand, str], object]
) -> None:
    """A place may be free: nobody is refused by what was true before."""
    move(hand, _full(hand))
    hand.requests.check_queue()


def test_a_client_that_leaves_makes_room(hand: OpenRequestsByHand) -> None:
    """Its request waited; the abort is on its way before the next one is offered."""
    waiting = hand.open()
    hand.hear(RequestAccepted(request_id=waiting.request_id, queued_ahead=7))
    refused = hand.open().request_id
    hand.hear(RequestRejected(request_id=refused, cause="queue_full", detail=_DETAIL))
    hand.requests.close(waiting.generation)
    hand.requests.check_queue()


@pytest.mark.parametrize(
    "cause", ["not_ready", "draining", "invalid", "too_long", "no_drafts", "deadline"]
)
def test_other_refusals_say_nothing_of_the_queue(hand: OpenRequestsByHand, cause: str) -> None:
    """Only a full queue is remembered."""
    name = hand.open().request_id
    hand.hear(RequestRejected(request_id=name, cause=cause, detail="No."))  # type: ignore[arg-type]
    hand.requests.check_queue()
