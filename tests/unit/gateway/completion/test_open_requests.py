"""Open requests over sessions that end and start: submissions, resumptions, errors and ends."""

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
    token_ids,
)
from shared.messages.gateway_link import FinishReason
from shared.transport.links import Connected, Lost, Quiet
from tests.unit.gateway.completion.open_requests_harness import (
    SCHEDULER,
    STOP_ID,
    OpenRequestsHarness,
    RecordingSink,
)
from tests.unit.gateway.tokenizing import small_tokenizers
from tests.unit.supervisor.status import status_reports


@pytest.fixture
def harness() -> OpenRequestsHarness:
    """A gateway's requests with a session to the scheduler."""
    opened = OpenRequestsHarness()
    opened.connect()
    return opened


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


def test_accepted_request_gets_all_token_text_and_ends_at_finish_message(
    harness: OpenRequestsHarness,
) -> None:
    """After acceptance, tokens and end the client has the text, and the gateway holds no
    request."""
    choice = harness.submit()
    name = choice.request_id
    harness.receive(RequestAccepted(request_id=name, queued_ahead=0), _tokens(name, 0, [40]))
    assert choice.generation.started.is_set()
    assert not choice.generation.ended.is_set()
    harness.receive(_tokens(name, 1, [41, 42]), _finish(name, 3))
    sink = choice.generation.sink
    assert isinstance(sink, RecordingSink)
    assert (len(sink.texts[0]), choice.tokens) == (3, [40, 41, 42])
    assert choice.generation.ended.is_set()
    assert choice.generation.confirmed.is_set()
    assert len(harness.requests) == 0


def test_request_is_submitted_to_next_session_when_link_breaks_right_after_connecting(
    harness: OpenRequestsHarness,
) -> None:
    """A session that starts and ends in one poll gets nothing; the next session gets the
    request."""
    choice = harness.submit()
    harness.lose()
    harness.requests.handle([Connected(SCHEDULER), Lost(SCHEDULER, "silent")])
    assert len(harness.requests) == 1
    harness.connect()
    assert harness.submitted()[-1].request_id == choice.request_id
    assert choice.generation.error is None


def test_request_stays_open_when_scheduler_is_quiet_but_not_lost(
    harness: OpenRequestsHarness,
) -> None:
    """The warning before a loss changes nothing for open requests."""
    choice = harness.submit()
    harness.requests.handle([Quiet(SCHEDULER)])

    assert len(harness.requests) == 1
    assert choice.generation.error is None


def test_each_scheduler_session_gets_open_request_once_with_tokens_so_far(
    harness: OpenRequestsHarness,
) -> None:
    """Each session gets the tokens so far and the rest of the deadline; no timer submits twice."""
    choice = harness.submit()
    name = choice.request_id
    harness.receive(RequestAccepted(request_id=name, queued_ahead=0), _tokens(name, 0, [40, 41]))
    harness.timers.advance(20.0)
    harness.lose()
    harness.connect()
    harness.receive(_rejection(name, "not_ready"))
    harness.lose()
    harness.timers.advance(RESUME_RETRY_S / 2)
    harness.connect()
    harness.receive(RequestAccepted(request_id=name, queued_ahead=0))
    harness.timers.advance(10 * RESUME_RETRY_S)
    resumed = harness.submitted()[1:]
    assert [request.generated for request in resumed] == [token_ids.pack([40, 41])] * 2
    assert resumed[0].deadline_s == pytest.approx(40.0)
    harness.receive(_tokens(name, 2, [42]), _finish(name, 3))
    assert choice.generation.error is None
    assert choice.tokens == [40, 41, 42]


@pytest.mark.parametrize("cause", ["not_ready", "queue_full", "draining"])
def test_request_is_submitted_repeatedly_when_new_scheduler_session_rejects_accepted_request(
    harness: OpenRequestsHarness, cause: str
) -> None:
    """After new sessions it is submitted every RESUME_RETRY_S, and rejections are not errors."""
    choice = harness.submit()
    name = choice.request_id
    harness.receive(RequestAccepted(request_id=name, queued_ahead=0))
    for _ in range(4):
        harness.lose()
        harness.connect()
        harness.receive(_rejection(name, cause))
    before = len(harness.submitted())
    for _ in range(6):
        harness.timers.advance(RESUME_RETRY_S)
        harness.receive(_rejection(name, cause))
    assert len(harness.submitted()) - before == 6
    assert choice.generation.error is None
    assert len(harness.requests) == 1


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "reason"), [([40, STOP_ID], 8, "stop"), ([40, 41], 2, "length")]
)
def test_gateway_ends_complete_request_itself_when_its_finish_message_is_lost(
    harness: OpenRequestsHarness, tokens: list[int], max_tokens: int, reason: str
) -> None:
    """If only RequestFinished was lost with the session, the gateway ends the request itself."""
    choice = harness.submit(max_tokens)
    harness.receive(_tokens(choice.request_id, 0, tokens))
    harness.lose()
    harness.connect()
    assert len(harness.submitted()) == 1
    assert choice.finish_reason == reason
    assert choice.generation.confirmed.is_set()
    assert len(harness.requests) == 0


@pytest.mark.parametrize("position", [0, 1, 3])
def test_request_is_aborted_with_error_when_token_position_has_gap(
    harness: OpenRequestsHarness, position: int
) -> None:
    """Sessions deliver once and in order, so a gap or repeat is a fault: abort and status 500."""
    choice = harness.submit()
    name = choice.request_id
    harness.receive(_tokens(name, 0, [40, 41]))
    harness.receive(_tokens(name, position, [41]))
    assert choice.generation.error is not None
    assert choice.generation.error.status == 500
    assert choice.tokens == [40, 41]
    assert harness.link.sent[-1] == AbortRequest(request_id=name, reason="abort")


def test_request_ends_with_error_when_finish_counts_more_tokens_than_arrived(
    harness: OpenRequestsHarness,
) -> None:
    """An end that counts more tokens than arrived means that tokens were lost."""
    choice = harness.submit()
    name = choice.request_id
    harness.receive(_tokens(name, 0, [40, 41]), _finish(name, 3))
    assert choice.generation.error is not None
    assert len(harness.requests) == 0


def test_gateway_ignores_scheduler_messages_for_ended_requests(
    harness: OpenRequestsHarness,
) -> None:
    """Messages that cross with an abort or with the end of a stop string change nothing."""
    left = harness.submit()
    stopped = harness.submit(stops=["B"])
    left_name, stopped_name = left.request_id, stopped.request_id
    vocabulary = small_tokenizers.byte_level().get_vocab()
    harness.receive(_tokens(stopped_name, 0, [vocabulary["A"], vocabulary["B"]]))
    assert stopped.finish_reason == "stop"
    harness.requests.close(left.generation)
    harness.requests.close(left.generation)
    harness.receive(
        _tokens(left_name, 0, [40]),
        _tokens(stopped_name, 2, [40]),
        _finish(left_name, 1, "abort"),
        _finish(stopped_name, 3, "stop"),
        RequestFailed(request_id=left_name, cause="failed", detail="Late."),
        _rejection(left_name, "queue_full"),
    )
    aborts = [message for message in harness.link.sent if isinstance(message, AbortRequest)]
    assert [(abort.request_id, abort.reason) for abort in aborts] == [
        (stopped_name, "stop"),
        (left_name, "abort"),
    ]
    assert stopped.generation.confirmed.is_set()
    assert stopped.generation.error is None
    assert len(harness.requests) == 0


def test_gateway_answers_503_and_delays_aborts_when_scheduler_link_is_full(
    harness: OpenRequestsHarness,
) -> None:
    """A new request gets a 503; an abort is sent when the link has room."""
    choice = harness.submit()
    harness.link.is_full = True
    with pytest.raises(ApiError) as refused:
        harness.submit()
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1.0)
    harness.requests.close(choice.generation)
    harness.link.is_full = False
    harness.timers.advance(RESUME_RETRY_S)
    assert harness.link.sent[-1] == AbortRequest(request_id=choice.request_id, reason="abort")


def test_open_requests_are_resumed_when_full_scheduler_link_has_room(
    harness: OpenRequestsHarness,
) -> None:
    """All open requests are resumed once each when the link has room."""
    choices = [harness.submit() for _ in range(3)]
    harness.lose()
    harness.link.is_full = True
    harness.connect()
    harness.timers.advance(3 * RESUME_RETRY_S)
    assert len(harness.submitted()) == 3
    harness.link.is_full = False
    harness.timers.advance(3 * RESUME_RETRY_S)
    assert len(harness.submitted()) == 6
    assert all(choice.generation.error is None for choice in choices)


def test_open_requests_end_with_503_when_scheduler_stays_away(harness: OpenRequestsHarness) -> None:
    """RECONNECT_WAIT_S_MAX after the first loss all requests end with a 503 and a Retry-After."""
    choice = harness.submit()
    harness.lose()
    harness.timers.advance(RECONNECT_WAIT_S_MAX - 1.0)
    assert not choice.generation.ended.is_set()
    harness.timers.advance(2.0)
    assert choice.generation.error is not None
    assert (choice.generation.error.status, choice.generation.error.retry_after_s) == (503, 5.0)
    harness.requests.close(choice.generation)
    harness.connect()
    assert harness.link.sent[-1] == QueryStatus()
    assert harness.timers.pending == 0


def test_requests_continue_when_scheduler_reconnects_before_deadline(
    harness: OpenRequestsHarness,
) -> None:
    """The timer of the first loss does not end requests of the new session."""
    choice = harness.submit()
    harness.lose()
    harness.timers.advance(RECONNECT_WAIT_S_MAX - 1.0)
    harness.connect()
    harness.timers.advance(RECONNECT_WAIT_S_MAX)
    assert choice.generation.error is None
    assert CONNECT_WAIT_S < RECONNECT_WAIT_S_MAX


def test_request_is_retried_while_ranks_that_were_ready_restart(
    harness: OpenRequestsHarness,
) -> None:
    """A world that was ready may come back: the request is retried for RESTART_WAIT_S_MAX."""
    harness.receive(_report(ready=True))
    choice = harness.submit()
    name = choice.request_id
    for _ in range(int(RESTART_WAIT_S_MAX / RESUME_RETRY_S) - 1):
        harness.receive(_rejection(name, "not_ready", retry_after_s=5.0))
        harness.timers.advance(RESUME_RETRY_S)
    assert _http_status(choice) is None
    assert len(harness.submitted()) == int(RESTART_WAIT_S_MAX / RESUME_RETRY_S)

    harness.timers.advance(RESUME_RETRY_S)
    harness.receive(_rejection(name, "not_ready", retry_after_s=5.0))
    assert _http_status(choice) == 503


@pytest.mark.parametrize(
    ("was_ready", "retry_after_s"), [(False, 5.0), (True, None)], ids=["never ready", "for good"]
)
def test_request_ends_with_503_at_once_when_ranks_were_never_ready(
    harness: OpenRequestsHarness, was_ready: bool, retry_after_s: float | None
) -> None:
    """A world that was never ready may load for an hour, and a failed one stays failed: 503."""
    harness.receive(_report(ready=was_ready))
    choice = harness.submit()
    harness.receive(_rejection(choice.request_id, "not_ready", retry_after_s=retry_after_s))

    assert _http_status(choice) == 503
