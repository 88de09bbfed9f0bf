"""Open requests by hand: no loop, no socket. Sessions come and go, messages cross, ends are one."""

import pytest

from services.gateway.completion.generation import Choice
from services.gateway.completion.open_requests import (
    CONNECT_WAIT_S,
    RECONNECT_WAIT_S_MAX,
    RESTART_WAIT_S_MAX,
    RESUME_RETRY_S,
)
from services.gateway.http.errors import ApiError
from shared.messages import (
    AbortRequest,
    QueryStatus,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    StatusReported,
    TokensGenerated,
)
from shared.messages.gateway_link import FinishReason
from shared.transport.links import Connected, Lost
from tests.unit.gateway.completion.open_requests_harness import (
    SCHEDULER,
    STOP_ID,
    OpenRequestsByHand,
    Texts,
)
from tests.unit.gateway.tokenizing import small_tokenizers
from tests.unit.supervisor.status import status_reports


@pytest.fixture
def hand() -> OpenRequestsByHand:
    """A gateway's requests with a session to the scheduler."""
    by_hand = OpenRequestsByHand()
    by_hand.connect()
    return by_hand


def _tokens(name: str, position: int, tokens: list[int]) -> TokensGenerated:
    return TokensGenerated(request_ids=[name], positions=[position], tokens=[tokens])


def _finish(name: str, tokens: int, reason: FinishReason = "length") -> RequestFinished:
    return RequestFinished(
        request_id=name, finish_reason=reason, prompt_tokens=3, completion_tokens=tokens
    )


def _rejection(name: str, cause: str, retry_after_s: float | None = None) -> RequestRejected:
    return RequestRejected(
        request_id=name,
        cause=cause,  # type: ignore[arg-type]
        detail="No.",
        retry_after_s=retry_after_s,
    )


def _http_status(choice: Choice) -> int | None:
    error = choice.generation.error
    return None if error is None else error.status


def _report(*, ready: bool) -> StatusReported:
    return status_reports.status_report(ready=ready)


def test_tokens_become_text_and_an_end(hand: OpenRequestsByHand) -> None:
    """The plain way, without any event loop: offered, taken, tokens, end, forgotten."""
    choice = hand.open()
    name = choice.request_id
    hand.hear(RequestAccepted(request_id=name, queued_ahead=0), _tokens(name, 0, [40]))
    assert choice.generation.started.is_set()
    assert not choice.generation.ended.is_set()
    hand.hear(_tokens(name, 1, [41, 42]), _finish(name, 3))
    sink = choice.generation.sink
    assert isinstance(sink, Texts)
    assert (len(sink.texts[0]), choice.tokens) == (3, [40, 41, 42])
    assert choice.generation.ended.is_set()
    assert choice.generation.confirmed.is_set()
    assert len(hand.requests) == 0


def test_a_session_that_ended_at_once_is_no_failure(hand: OpenRequestsByHand) -> None:
    """One poll brings Connected and Lost: the link is gone already when the first is handled."""
    choice = hand.open()
    hand.lose()
    hand.requests.handle([Connected(SCHEDULER), Lost(SCHEDULER, "silent")])
    assert len(hand.requests) == 1
    hand.connect()
    assert hand.submits()[-1].request_id == choice.request_id
    assert choice.generation.error is None


def test_every_session_gets_each_open_request_once(hand: OpenRequestsByHand) -> None:
    """With the tokens so far and what is left of the deadline; no timer offers it a second time."""
    choice = hand.open()
    name = choice.request_id
    hand.hear(RequestAccepted(request_id=name, queued_ahead=0), _tokens(name, 0, [40, 41]))
    hand.timers.advance(20.0)
    hand.lose()
    hand.connect()
    hand.hear(_rejection(name, "not_ready"))
    hand.lose()
    hand.timers.advance(RESUME_RETRY_S / 2)
    hand.connect()
    hand.hear(RequestAccepted(request_id=name, queued_ahead=0))
    hand.timers.advance(10 * RESUME_RETRY_S)
    again = hand.submits()[1:]
    assert [order.generated for order in again] == [[40, 41]] * 2
    assert again[0].deadline_s == pytest.approx(40.0)
    hand.hear(_tokens(name, 2, [42]), _finish(name, 3))
    assert choice.generation.error is None
    assert choice.tokens == [40, 41, 42]


@pytest.mark.parametrize("cause", ["not_ready", "queue_full", "draining"])
def test_what_was_taken_once_is_offered_until_it_is_taken(
    hand: OpenRequestsByHand, cause: str
) -> None:
    """Every half second one offer, however often sessions ended; never an error."""
    choice = hand.open()
    name = choice.request_id
    hand.hear(RequestAccepted(request_id=name, queued_ahead=0))
    for _ in range(4):
        hand.lose()
        hand.connect()
        hand.hear(_rejection(name, cause))
    before = len(hand.submits())
    for _ in range(6):
        hand.timers.advance(RESUME_RETRY_S)
        hand.hear(_rejection(name, cause))
    assert len(hand.submits()) - before == 6
    assert choice.generation.error is None
    assert len(hand.requests) == 1


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "reason"), [([40, STOP_ID], 8, "stop"), ([40, 41], 2, "length")]
)
def test_what_had_ended_is_not_offered_again(
    hand: OpenRequestsByHand, tokens: list[int], max_tokens: int, reason: str
) -> None:
    """Only the message that says so was lost with the session: the gateway knows by itself."""
    choice = hand.open(max_tokens)
    hand.hear(_tokens(choice.request_id, 0, tokens))
    hand.lose()
    hand.connect()
    assert len(hand.submits()) == 1
    assert choice.finish_reason == reason
    assert choice.generation.confirmed.is_set()
    assert len(hand.requests) == 0


@pytest.mark.parametrize("position", [0, 1, 3])
def test_a_gap_or_a_repeat_ends_the_request(hand: OpenRequestsByHand, position: int) -> None:
    """Sessions deliver once and in order, so it is a fault of the sender: aborted, and an error."""
    choice = hand.open()
    name = choice.request_id
    hand.hear(_tokens(name, 0, [40, 41]))
    hand.hear(_tokens(name, position, [41]))
    assert choice.generation.error is not None
    assert choice.generation.error.status == 500
    assert choice.tokens == [40, 41]
    assert hand.link.sent[-1] == AbortRequest(request_id=name, reason="abort")


def test_an_end_with_another_count_is_an_error(hand: OpenRequestsByHand) -> None:
    """An end that counts more tokens than came means that some were lost."""
    choice = hand.open()
    name = choice.request_id
    hand.hear(_tokens(name, 0, [40, 41]), _finish(name, 3))
    assert choice.generation.error is not None
    assert len(hand.requests) == 0


def test_what_comes_for_requests_that_ended_is_nothing(hand: OpenRequestsByHand) -> None:
    """The abort crosses tokens and the end; a stop string ends before the scheduler knows."""
    left = hand.open()
    stopped = hand.open(stops=["B"])
    left_name, stopped_name = left.request_id, stopped.request_id
    vocabulary = small_tokenizers.byte_level().get_vocab()
    hand.hear(_tokens(stopped_name, 0, [vocabulary["A"], vocabulary["B"]]))
    assert stopped.finish_reason == "stop"
    hand.requests.close(left.generation)
    hand.requests.close(left.generation)
    hand.hear(
        _tokens(left_name, 0, [40]),
        _tokens(stopped_name, 2, [40]),
        _finish(left_name, 1, "abort"),
        _finish(stopped_name, 3, "stop"),
        RequestFailed(request_id=left_name, cause="failed", detail="Late."),
        _rejection(left_name, "queue_full"),
    )
    aborts = [message for message in hand.link.sent if isinstance(message, AbortRequest)]
    assert [(abort.request_id, abort.reason) for abort in aborts] == [
        (stopped_name, "stop"),
        (left_name, "abort"),
    ]
    assert stopped.generation.confirmed.is_set()
    assert stopped.generation.error is None
    assert len(hand.requests) == 0


def test_a_full_link_refuses_a_new_request_and_keeps_an_abort(hand: OpenRequestsByHand) -> None:
    """Refused means not taken; an abort that cannot be sent now is sent later."""
    choice = hand.open()
    hand.link.is_full = True
    with pytest.raises(ApiError) as refused:
        hand.open()
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1.0)
    hand.requests.close(choice.generation)
    hand.link.is_full = False
    hand.timers.advance(RESUME_RETRY_S)
    assert hand.link.sent[-1] == AbortRequest(request_id=choice.request_id, reason="abort")


def test_a_full_link_delays_a_resumption(hand: OpenRequestsByHand) -> None:
    """All are offered in the end, once each."""
    choices = [hand.open() for _ in range(3)]
    hand.lose()
    hand.link.is_full = True
    hand.connect()
    hand.timers.advance(3 * RESUME_RETRY_S)
    assert len(hand.submits()) == 3
    hand.link.is_full = False
    hand.timers.advance(3 * RESUME_RETRY_S)
    assert len(hand.submits()) == 6
    assert all(choice.generation.error is None for choice in choices)


def test_a_scheduler_that_stays_away_ends_all(hand: OpenRequestsByHand) -> None:
    """After RECONNECT_WAIT_S_MAX since the first loss, with a 503 that has a Retry-After."""
    choice = hand.open()
    hand.lose()
    hand.timers.advance(RECONNECT_WAIT_S_MAX - 1.0)
    assert not choice.generation.ended.is_set()
    hand.timers.advance(2.0)
    assert choice.generation.error is not None
    assert (choice.generation.error.status, choice.generation.error.retry_after_s) == (503, 5.0)
    hand.requests.close(choice.generation)
    hand.connect()
    assert hand.link.sent[-1] == QueryStatus()
    assert hand.timers.pending == 0


def test_a_scheduler_that_came_back_in_time_ends_nothing(hand: OpenRequestsByHand) -> None:
    """The timer of the first loss does not end what the new scheduler runs."""
    choice = hand.open()
    hand.lose()
    hand.timers.advance(RECONNECT_WAIT_S_MAX - 1.0)
    hand.connect()
    hand.timers.advance(RECONNECT_WAIT_S_MAX)
    assert choice.generation.error is None
    assert CONNECT_WAIT_S < RECONNECT_WAIT_S_MAX


def test_a_new_request_waits_for_a_world_that_has_served(hand: OpenRequestsByHand) -> None:
    """A world on its way back refuses for now: the request is offered again, for half a minute."""
    hand.hear(_report(ready=True))
    choice = hand.open()
    name = choice.request_id
    for _ in range(int(RESTART_WAIT_S_MAX / RESUME_RETRY_S) - 1):
        hand.hear(_rejection(name, "not_ready", retry_after_s=5.0))
        hand.timers.advance(RESUME_RETRY_S)
    assert _http_status(choice) is None
    assert len(hand.submits()) == int(RESTART_WAIT_S_MAX / RESUME_RETRY_S)

    hand.timers.advance(RESUME_RETRY_S)
    hand.hear(_rejection(name, "not_ready", retry_after_s=5.0))
    assert _http_status(choice) == 503


@pytest.mark.parametrize(
    ("was_ready", "retry_after_s"), [(False, 5.0), (True, None)], ids=["never ready", "for good"]
)
def test_a_new_request_does_not_wait_in_vain(
    hand: OpenRequestsByHand, was_ready: bool, retry_after_s: float | None
) -> None:
    """A world that has never served may load for an hour, and one that has failed stays so."""
    hand.hear(_report(ready=was_ready))
    choice = hand.open()
    hand.hear(_rejection(choice.request_id, "not_ready", retry_after_s=retry_after_s))

    assert _http_status(choice) == 503
