"""All open requests of this gateway. Owns submitting, resuming and ending them; does no I/O itself.

The link, the timers and the clock are passed in. Only `submit` needs an event loop.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal, assert_never

from services.gateway.completion.cache_misses import CacheMisses
from services.gateway.completion.generation import Choice, Generation
from services.gateway.completion.streaming import FlushList
from services.gateway.http import errors
from services.gateway.http.admission import FullQueue
from services.gateway.links.scheduler_client import CallLater, Events, Link, Timer
from services.gateway.links.scheduler_status import StatusBoard
from services.gateway.metrics.gateway import GatewayMetrics
from services.gateway.tracing.tracing import Tracing
from shared import messages
from shared.clock import Clock
from shared.errors import LinkError, LinkFull, PeerUnknown
from shared.log import Log
from shared.transport.links import Connected, Lost, Quiet, Received

CONNECT_WAIT_S = 5.0
"""Time for which a new request waits for a session to the scheduler before it gets a 503."""
RECONNECT_WAIT_S_MAX = 120.0
"""Time for which open requests wait for a lost scheduler, which is restarted in seconds."""
RESTART_WAIT_S_MAX = 30.0
"""Time for which a new request waits for a world that was ready before and restarts."""
RESUME_RETRY_S = 0.5
"""Time after which a request is sent again that a restarted scheduler cannot accept yet."""

PageReport = messages.ActivityReported | messages.ExpertsReported
"""A report of the scheduler that pages show."""

_log = Log("gateway.requests")
_NO_LOGPROBS: list[list[messages.TokenLogprobs]] = [[]]


class OpenRequests:
    """All choices that the scheduler has not ended yet, by the id of their request to it.

    Sends them, resumes them after a restart, aborts them, and gives them their tokens and ends.
    """

    def __init__(
        self,
        link: Link,
        call_later: CallLater,
        clock: Clock,
        status: StatusBoard,
        metrics: GatewayMetrics,
        flush_list: FlushList,
        tracing: Tracing | None = None,
    ) -> None:
        """Store the parts; the link's owner must call `handle` with received events.

        Args:
            link: sends to the scheduler.
            call_later: sets a timer.
            clock: the time.
            status: stores the scheduler's reports.
            metrics: counts ends and durations.
            flush_list: streams with unwritten events.
            tracing: records HTTP requests; None: a new one, which has none.
        """
        self.link = link
        """The link to the scheduler, over which the page's feed sends its queries too."""
        self._call_later = call_later
        self._clock = clock
        self._status = status
        self._metrics = metrics
        self._flush_list = flush_list
        self._tracing = tracing or Tracing(link, clock)
        self._choices: dict[str, Choice] = {}
        self._reconnect_timer: Timer | None = None
        """Set while the session is lost; fails all requests when it fires."""
        self._queue = FullQueue(clock)
        self.cache_misses = CacheMisses()
        """The last prompts that the cache did not have."""
        self.on_page_report: Callable[[PageReport], None] = lambda _: None
        """Receives the scheduler's answers to the queries of the page's feed."""

    def __len__(self) -> int:
        return len(self._choices)

    def __iter__(self) -> Iterator[Choice]:
        return iter(list(self._choices.values()))

    def check_queue(self, tenant: str) -> None:
        """Refuse a new request of a tenant for which the scheduler's queue is known to be full.

        Raises:
            ApiError: 429 when the scheduler rejected a request of the tenant as `queue_full` less
                than `FULL_MEMORY_S` ago and none of any tenant has left the queue since.
        """
        error = self._queue.error(tenant)
        if error is not None:
            self._metrics.rejections["queue_full"] += 1
            raise error

    async def submit(self, generation: Generation) -> None:
        """Send all choices of a generation to the scheduler, after waiting for it if it is away.

        Raises:
            ApiError: 429 when the queue is full; 503 when the scheduler stays away or does not keep
                up.
        """
        self.check_queue(generation.tenant)
        # A dead peer's link may look alive for seconds, but its reports stop at once.
        is_lost = self._reconnect_timer is not None
        wait_s = RESTART_WAIT_S_MAX if is_lost and self._status.was_ready else CONNECT_WAIT_S
        if not await self._status.wait_for_report(wait_s):
            cause = (
                "The server is shutting down."
                if self._status.is_draining
                else "The scheduler cannot be reached."
            )
            raise errors.unavailable(cause, CONNECT_WAIT_S)
        self.send(generation)

    def send(self, generation: Generation) -> None:
        """Send all choices of a generation to the scheduler now, without waiting for it.

        Raises:
            ApiError: 503 when there is no session or the scheduler does not keep up.
        """
        now_s = self._clock.now()
        generation.note_submitted(now_s)
        for choice in generation.choices:
            choice.submitted_s = now_s
            self._choices[choice.request_id] = choice
            try:
                self.link.send(choice.submit_request)
            except (LinkFull, PeerUnknown) as error:
                raise errors.unavailable(f"The scheduler is busy: {error}.", 1.0) from None

    def close(self, generation: Generation) -> None:
        """Remove a generation's choices; tell the scheduler to abort those that still run.

        Idempotent.
        """
        for choice in generation.choices:
            is_open = self._choices.pop(choice.request_id, None) is not None
            if is_open and not choice.finish_reason and not choice.is_confirmed:
                self._metrics.ends["abort"] += 1
                self._abort(choice, "abort")

    def fail_all(self, message: str) -> None:
        """Fail the choices sent to the scheduler with a 503 `message`; end the wait in `submit`."""
        self._status.cancel_waits()
        for choice in list(self._choices.values()):
            choice.generation.fail(errors.unavailable(message, 5.0))

    def close_link(self) -> None:
        """Close the link to the scheduler."""
        self.link.close()

    def handle(self, events: Events) -> None:
        """Handle received messages and session changes in order, then write to all clients at once.

        The output of the messages is buffered by each client's stream until then.
        """
        now_s = self._clock.now()
        for event in events:
            match event:
                case Received():
                    self._handle_message(event.message, now_s)
                case Connected():
                    self._resume_all()
                case Lost():
                    self._handle_lost(event.cause)
                case Quiet():
                    pass  # The link has logged it, and the scheduler may still answer.
                case _:
                    assert_never(event)
        self._flush_list.flush(now_s)

    def _handle_message(self, message: messages.ToGateway, now_s: float) -> None:
        match message:
            case messages.TokensGenerated():
                self._handle_tokens(message, now_s)
            case messages.RequestFinished():
                self._handle_finished(message, now_s)
            case messages.RequestAccepted():
                accepted = self._choices.get(message.request_id)
                if accepted is not None:
                    accepted.is_accepted = True
            case messages.RequestAdmitted():
                self._handle_admitted(message, now_s)
            case messages.RequestRejected():
                self._handle_rejected(message)
            case messages.RequestFailed():
                self._queue.clear()
                choice = self._choices.pop(message.request_id, None)
                if choice is not None:
                    choice.is_confirmed = True
                    self._metrics.ends["error"] += 1
                    self._metrics.failures[message.cause] += 1
                    choice.generation.fail(errors.ended(message))
            case messages.StatusReported():
                self._status.report(message, now_s)
            case messages.ActivityReported() | messages.ExpertsReported():
                self.on_page_report(message)
            case messages.QueryHttpRequests() | messages.TraceReported():
                self._tracing.handle(message, now_s)
            case messages.ProfilesReported():
                pass  # Only operator commands query them, over links of their own.
            case _:
                assert_never(message)

    def _handle_admitted(self, message: messages.RequestAdmitted, now_s: float) -> None:
        self._queue.clear()
        choice = self._choices.get(message.request_id)
        # A restarted scheduler admits again; usage reports the first admission.
        if choice is None or choice.cached is not None:
            return
        choice.cached = message.cached
        self.cache_misses.note(choice)
        choice.generation.note_admitted(now_s)

    def _handle_tokens(self, message: messages.TokensGenerated, now_s: float) -> None:
        count = len(message.request_ids)
        logprobs = message.logprobs or _NO_LOGPROBS * count
        if not count == len(message.positions) == len(message.tokens) == len(logprobs):
            _log.error("tokens_message_malformed", requests=count)
            return
        choices = self._choices
        is_recorded, step = self._tracing.recorder.is_on, (message.epoch, message.step_id)
        # Most choices have waited since the same step, so their waits are counted together.
        new_tokens, since_s, waiting = 0, now_s, 0
        entries = zip(message.request_ids, message.positions, message.tokens, logprobs, strict=True)
        for name, position, tokens, entry_logprobs in entries:
            choice = choices.get(name)
            if choice is None or choice.finish_reason:
                # The choice ended here or its client left; the scheduler gets the abort soon.
                if choice is not None:
                    choice.count_past_end(len(tokens))
                continue
            if position != len(choice.tokens) or not tokens:
                self._fail_position(choice, position)
                continue
            if not position:
                self._metrics.first_token.observe(now_s - choice.submitted_s)
                choice.generation.note_first_token(now_s)
            elif choice.last_token_s == since_s:
                waiting += 1
            else:
                self._metrics.next_token.observe(now_s - since_s, waiting)
                since_s, waiting = choice.last_token_s, 1
            if is_recorded and (traced := choice.generation.traced) is not None:
                traced.step = step
                traced.new_tokens += len(tokens)
            new_tokens += len(tokens)
            choice.last_token_s = now_s
            if choice.add(tokens, entry_logprobs):
                self._metrics.observe_end("stop", now_s - choice.submitted_s, choice.calls)
                self._abort(choice, "stop")
        self._metrics.next_token.observe(now_s - since_s, waiting)
        self._metrics.generation_tokens += new_tokens

    def _handle_finished(self, message: messages.RequestFinished, now_s: float) -> None:
        self._queue.clear()
        choice = self._choices.pop(message.request_id, None)
        if choice is None:
            return
        choice.is_confirmed = True
        choice.set_draft_counts(message.drafts_accepted, message.drafts_rejected)
        if choice.cached is None:
            choice.cached = message.cached
        if not choice.finish_reason:
            if message.finish_reason in ("stop", "length"):
                if message.completion_tokens != len(choice.tokens):
                    self._fail_count(choice, message.completion_tokens)
                    return
                choice.finish(message.finish_reason)
                seconds = now_s - choice.submitted_s
                self._metrics.observe_end(message.finish_reason, seconds, choice.calls)
            else:
                self._metrics.ends[message.finish_reason] += 1
                choice.generation.fail(errors.cut_off(message))
        choice.generation.update_confirmed()

    def _handle_rejected(self, message: messages.RequestRejected) -> None:
        choice = self._choices.get(message.request_id)
        if choice is None:
            return
        was_accepted = choice.is_accepted or choice.tokens
        is_resumed = was_accepted and message.cause in ("not_ready", "queue_full", "draining")
        if is_resumed or self._is_world_restarting(message, choice):
            # A restarted scheduler or world cannot take it yet: it is sent again until it can.
            self._resume_later(choice)
            return
        if message.cause == "queue_full":
            self._queue.store(choice.generation.tenant, message)
        del self._choices[message.request_id]
        choice.is_confirmed = True
        self._metrics.rejections[message.cause] += 1
        choice.generation.fail(errors.rejected(message, choice.generation.prompt_param))

    def _is_world_restarting(self, message: messages.RequestRejected, choice: Choice) -> bool:
        """Return whether a new request should wait because the world is ready again in seconds."""
        is_temporary = message.cause == "not_ready" and message.retry_after_s is not None
        waited_s = self._clock.now() - choice.submitted_s
        return is_temporary and self._status.was_ready and waited_s < RESTART_WAIT_S_MAX

    def _fail_position(self, choice: Choice, position: int) -> None:
        _log.error(
            "unexpected_token_position",
            request_id=choice.request_id,
            position=position,
            expected=len(choice.tokens),
        )
        self._metrics.ends["error"] += 1
        self._choices.pop(choice.request_id, None)
        self._abort(choice, "abort")
        choice.generation.fail(errors.failed("Tokens arrived out of order."))

    def _fail_count(self, choice: Choice, completion_tokens: int) -> None:
        _log.error(
            "unexpected_token_count",
            request_id=choice.request_id,
            completion_tokens=completion_tokens,
            received=len(choice.tokens),
        )
        self._metrics.ends["error"] += 1
        choice.generation.fail(errors.failed("Not all tokens of the completion arrived."))

    def _abort(self, choice: Choice, reason: Literal["abort", "stop"]) -> None:
        self._queue.clear()
        message = messages.AbortRequest(request_id=choice.request_id, reason=reason)
        try:
            self.link.send(message)
        except PeerUnknown:
            # The session is lost, so the scheduler has dropped all requests of this gateway.
            pass
        except LinkFull:
            self._call_later(RESUME_RETRY_S, self._abort, choice, reason)

    def _handle_lost(self, cause: str) -> None:
        _log.warning("scheduler_lost", cause=cause, open=len(self._choices))
        self._status.mark_lost()
        self._queue.clear()
        if self._reconnect_timer is None:
            self._reconnect_timer = self._call_later(RECONNECT_WAIT_S_MAX, self._fail_unresumed)

    def _fail_unresumed(self) -> None:
        # Clearing the timer makes new requests wait only CONNECT_WAIT_S.
        self._reconnect_timer = None
        self.fail_all("The scheduler has been away for too long.")

    def _resume_all(self) -> None:
        """Send every open request, with its tokens so far, to a scheduler with a new session."""
        if self._reconnect_timer is not None:
            self._reconnect_timer.cancel()
            self._reconnect_timer = None
        _log.info("scheduler_connected", open=len(self._choices))
        # The session may be lost again; the Lost event then follows in the same list.
        with contextlib.suppress(LinkError):
            self.link.send(messages.QueryStatus())
        for choice in list(self._choices.values()):
            self._resume(choice)

    def _resume(self, choice: Choice) -> None:
        choice.is_retry_due = False
        if self._choices.get(choice.request_id) is not choice:
            return
        if choice.finish_reason:
            del self._choices[choice.request_id]
            choice.is_confirmed = True
            choice.generation.update_confirmed()
            return
        request = choice.submit_request
        is_stopped = bool(choice.tokens) and choice.tokens[-1] in request.stop_ids
        if is_stopped or len(choice.tokens) >= request.max_tokens:
            # All tokens arrived and only RequestFinished was lost.
            finished = messages.RequestFinished(
                request_id=choice.request_id,
                finish_reason="stop" if is_stopped else "length",
                prompt_tokens=request.prompt_tokens,
                completion_tokens=len(choice.tokens),
            )
            self._handle_finished(finished, self._clock.now())
            return
        try:
            self.link.send(choice.resumed_request(self._clock.now()))
        except PeerUnknown:
            pass
        except LinkFull:
            self._resume_later(choice)

    def _resume_later(self, choice: Choice) -> None:
        choice.is_retry_due = True
        self._call_later(RESUME_RETRY_S, self._retry, choice)

    def _retry(self, choice: Choice) -> None:
        # A new session may have resumed it meanwhile; then it must not be sent again.
        if choice.is_retry_due:
            self._resume(choice)
