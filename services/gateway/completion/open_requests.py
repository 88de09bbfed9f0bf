"""All open requests of this gateway: submitted, handed what arrives, ended once, resumed.

Nothing here does I/O or needs an event loop but `submit`, which may wait: the link, the timers and
the clock come from outside.
"""

import contextlib
from typing import Literal, assert_never

import msgspec

from services.gateway.completion.full_queue import FullQueue
from services.gateway.completion.generation import Choice, Generation
from services.gateway.completion.streaming import FlushList
from services.gateway.http import errors
from services.gateway.metrics.gateway import GatewayMetrics
from services.gateway.scheduler_client.link import Events, Later, Link, Timer
from services.gateway.scheduler_client.scheduler_status import StatusBoard
from shared.clock import Clock
from shared.errors import LinkError, LinkFull, PeerUnknown
from shared.log import Log
from shared.messages import (
    AbortRequest,
    QueryStatus,
    RequestAccepted,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    StatusReported,
    SubmitRequest,
    TokensGenerated,
)
from shared.messages.base import TokenLogprobs
from shared.transport.links import Connected, Lost, Received

CONNECT_WAIT_S = 5.0
"""A request waits so long for the scheduler to come back before it is a 503."""
LOST_S_MAX = 120.0
"""Open requests wait so long for a scheduler that is gone; it is restarted in seconds."""
AWAY_S_MAX = 30.0
"""A new request waits so long for a world that has served before and is on its way back."""
RESUME_RETRY_S = 0.5
"""A resumed request that the scheduler cannot take yet is offered again after so long."""

_log = Log("gateway.requests")


class OpenRequests:
    """Knows every choice that runs, by its request id."""

    def __init__(
        self,
        link: Link,
        later: Later,
        clock: Clock,
        status: StatusBoard,
        metrics: GatewayMetrics,
        flush_list: FlushList,
    ) -> None:
        """Wire it; whoever owns the link calls `handle` with what arrives.

        Args:
            link: to the scheduler.
            later: sets a timer.
            clock: the time.
            status: takes the scheduler's reports.
            metrics: counts ends and times.
            flush_list: the streams that have something to write.
        """
        self._link = link
        self._later = later
        self._clock = clock
        self._status = status
        self._metrics = metrics
        self._flush_list = flush_list
        self._choices: dict[str, Choice] = {}
        self._give_up_timer: Timer | None = None
        self._queue = FullQueue(clock)

    def __len__(self) -> int:
        return len(self._choices)

    def check_queue(self) -> None:
        """Refuse a new request that the scheduler would refuse too.

        Raises:
            ApiError: 429; its queue was full a moment ago, and nothing has moved since.
        """
        refusal = self._queue.refusal()
        if refusal is not None:
            self._metrics.count_rejection("queue_full")
            raise refusal

    async def submit(self, generation: Generation, prompt_param: str) -> None:
        """Wait for the scheduler if it is away, and send it all choices of a generation.

        Raises:
            ApiError: 503; there is no scheduler, or it does not keep up.
        """
        # A link may look alive for seconds after its peer died; reports do not lie.
        is_away = self._give_up_timer is not None
        wait_s = AWAY_S_MAX if is_away and self._status.was_ready else CONNECT_WAIT_S
        if not await self._status.wait_fresh(wait_s):
            cause = (
                "The server is shutting down."
                if self._status.is_draining
                else "The scheduler cannot be reached."
            )
            raise errors.unavailable(cause, CONNECT_WAIT_S)
        self.offer(generation, prompt_param)

    def offer(self, generation: Generation, prompt_param: str) -> None:
        """Send all choices of a generation to the scheduler.

        Raises:
            ApiError: 503; there is no scheduler, or it does not keep up.
        """
        generation.prompt_param = prompt_param
        now_s = self._clock.now()
        for choice in generation.choices:
            choice.submitted_s = now_s
            self._choices[choice.order.request_id] = choice
            try:
                self._link.send(choice.order)
            except (LinkFull, PeerUnknown) as error:
                raise errors.unavailable(f"The scheduler is busy: {error}.", 1.0) from None

    def close(self, generation: Generation) -> None:
        """Forget a generation; what still runs of it is aborted. May be called again."""
        for choice in generation.choices:
            is_open = self._choices.pop(choice.order.request_id, None) is not None
            if is_open and not choice.finish_reason and not choice.is_accounted:
                self._metrics.count_end("abort")
                self._abort(choice, "abort")

    def fail_all(self, message: str) -> None:
        """End every open request with a 503, those too that wait for a scheduler to come back."""
        self._status.end_waits()
        for choice in list(self._choices.values()):
            choice.generation.fail(errors.unavailable(message, 5.0))

    def shut(self) -> None:
        """Close the link."""
        self._link.close()

    def handle(self, events: Events) -> None:
        """Take what arrived, in order, and write what the streams then have to say."""
        now_s = self._clock.now()
        for event in events:
            match event:
                case Received():
                    self._take(event.message, now_s)
                case Connected():
                    self._resume_all()
                case Lost():
                    self._lose(event.cause)
                case _:
                    assert_never(event)
        self._flush_list.flush()

    def _take(
        self,
        message: TokensGenerated
        | RequestAccepted
        | RequestFinished
        | RequestAdmitted
        | RequestRejected
        | RequestFailed
        | StatusReported,
        now_s: float,
    ) -> None:
        match message:
            case TokensGenerated():
                self._take_tokens(message, now_s)
            case RequestFinished():
                self._take_finish(message, now_s)
            case RequestAccepted():
                accepted = self._choices.get(message.request_id)
                if accepted is not None:
                    accepted.is_accepted = True
            case RequestAdmitted():
                self._queue.note_moved()
                admitted = self._choices.get(message.request_id)
                # A scheduler that was restarted admits again; what counts is the first time.
                if admitted is not None and admitted.cached is None:
                    admitted.cached = message.cached
            case RequestRejected():
                self._take_rejection(message)
            case RequestFailed():
                self._queue.note_moved()
                choice = self._choices.pop(message.request_id, None)
                if choice is not None:
                    choice.is_accounted = True
                    self._metrics.count_end("error")
                    choice.generation.fail(errors.ended(message))
            case StatusReported():
                self._status.report(message, now_s)
            case _:
                assert_never(message)

    def _take_tokens(self, message: TokensGenerated, now_s: float) -> None:
        names = message.request_ids
        count = len(names)
        logprobs = message.logprobs or _NO_LOGPROBS * count
        if not count == len(message.positions) == len(message.tokens) == len(logprobs):
            _log.error("tokens_malformed", requests=count)
            return
        choices = self._choices
        for place in range(count):
            choice = choices.get(names[place])
            tokens = message.tokens[place]
            if choice is None or choice.finish_reason:
                # It ended here or its client left; the abort is on its way.
                if choice is not None:
                    choice.add_past_end(len(tokens))
                continue
            if message.positions[place] != len(choice.tokens) or not tokens:
                self._refuse_position(choice, message.positions[place])
                continue
            if choice.tokens:
                self._metrics.observe_tokens(now_s - choice.last_token_s, len(tokens))
            else:
                self._metrics.observe_first_token(now_s - choice.submitted_s, len(tokens))
                choice.generation.begin()
            choice.last_token_s = now_s
            if choice.add(tokens, logprobs[place]):
                self._metrics.observe_end("stop", now_s - choice.submitted_s)
                self._abort(choice, "stop")

    def _take_finish(self, message: RequestFinished, now_s: float) -> None:
        self._queue.note_moved()
        choice = self._choices.pop(message.request_id, None)
        if choice is None:
            return
        choice.is_accounted = True
        choice.account(message.drafts_accepted, message.drafts_rejected)
        if choice.cached is None:
            choice.cached = message.cached
        if not choice.finish_reason:
            if message.finish_reason in ("stop", "length"):
                if message.completion_tokens != len(choice.tokens):
                    self._refuse_count(choice, message.completion_tokens)
                    return
                self._metrics.observe_end(message.finish_reason, now_s - choice.submitted_s)
                choice.finish(message.finish_reason)
            else:
                self._metrics.count_end(message.finish_reason)
                choice.generation.fail(_ended_badly(message))
        choice.generation.check_accounted()

    def _take_rejection(self, message: RequestRejected) -> None:
        choice = self._choices.get(message.request_id)
        if choice is None:
            return
        is_taken = choice.is_accepted or choice.tokens
        if is_taken and message.cause in ("not_ready", "queue_full", "draining"):
            # It was taken once and its client waits: it is offered until the world is back.
            self._resume_later(choice)
            return
        if self._comes_back(message, choice):
            self._resume_later(choice)
            return
        if message.cause == "queue_full":
            self._queue.note_full(message)
        del self._choices[message.request_id]
        choice.is_accounted = True
        self._metrics.count_rejection(message.cause)
        choice.generation.fail(errors.rejected(message, choice.generation.prompt_param))

    def _comes_back(self, message: RequestRejected, choice: Choice) -> bool:
        """Tell whether a new request had better wait: the world is back in seconds."""
        is_passing = message.cause == "not_ready" and message.retry_after_s is not None
        waited_s = self._clock.now() - choice.submitted_s
        return is_passing and self._status.was_ready and waited_s < AWAY_S_MAX

    def _refuse_position(self, choice: Choice, position: int) -> None:
        _log.error(
            "token_position_wrong",
            request_id=choice.order.request_id,
            position=position,
            expected=len(choice.tokens),
        )
        self._metrics.count_end("error")
        self._choices.pop(choice.order.request_id, None)
        self._abort(choice, "abort")
        choice.generation.fail(errors.failed("Tokens arrived out of order."))

    def _refuse_count(self, choice: Choice, completion_tokens: int) -> None:
        _log.error(
            "token_count_wrong",
            request_id=choice.order.request_id,
            completion_tokens=completion_tokens,
            received=len(choice.tokens),
        )
        self._metrics.count_end("error")
        choice.generation.fail(errors.failed("Not all tokens of the completion arrived."))

    def _abort(self, choice: Choice, reason: Literal["abort", "stop"]) -> None:
        self._queue.note_moved()
        order = AbortRequest(request_id=choice.order.request_id, reason=reason)
        try:
            self._link.send(order)
        except PeerUnknown:
            # The scheduler has lost us, and with us all our requests.
            pass
        except LinkFull:
            self._later(RESUME_RETRY_S, self._abort, choice, reason)

    def _lose(self, cause: str) -> None:
        _log.warning("scheduler_lost", cause=cause, open=len(self._choices))
        self._status.forget()
        self._queue.note_moved()
        if self._give_up_timer is None:
            self._give_up_timer = self._later(LOST_S_MAX, self._give_up)

    def _give_up(self) -> None:
        # From now on new requests wait no longer than for a scheduler that was never there.
        self._give_up_timer = None
        self.fail_all("The scheduler has been away for too long.")

    def _resume_all(self) -> None:
        """Offer every open request to a scheduler that has not seen it, with its tokens so far."""
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None
        _log.info("scheduler_connected", open=len(self._choices))
        # The session may have ended again already; that news is behind this.
        with contextlib.suppress(LinkError):
            self._link.send(QueryStatus())
        for choice in list(self._choices.values()):
            self._resume(choice)

    def _resume(self, choice: Choice) -> None:
        name = choice.order.request_id
        choice.is_retry_due = False
        if self._choices.get(name) is not choice:
            return
        if choice.finish_reason:
            del self._choices[name]
            choice.is_accounted = True
            choice.generation.check_accounted()
            return
        order = choice.order
        is_stopped = bool(choice.tokens) and choice.tokens[-1] in order.stop_ids
        if is_stopped or len(choice.tokens) >= order.max_tokens:
            # It had ended; only the message that says so was lost.
            self._take_finish(_finish_of(choice, is_stopped=is_stopped), self._clock.now())
            return
        elapsed_s = self._clock.now() - choice.submitted_s
        deadline_s = max(0.0, order.deadline_s - elapsed_s)
        resumed = msgspec.structs.replace(
            order,
            generated=list(choice.tokens),
            deadline_s=deadline_s,
            more_requests_expected=False,
        )
        try:
            self._link.send(resumed)
        except PeerUnknown:
            pass
        except LinkFull:
            self._resume_later(choice)

    def _resume_later(self, choice: Choice) -> None:
        choice.is_retry_due = True
        self._later(RESUME_RETRY_S, self._retry, choice)

    def _retry(self, choice: Choice) -> None:
        # Not if a new session has offered it meanwhile: what runs need not be offered.
        if choice.is_retry_due:
            self._resume(choice)


_NO_LOGPROBS: list[list[TokenLogprobs]] = [[]]


def _ended_badly(message: RequestFinished) -> errors.ApiError:
    if message.finish_reason == "error":
        return errors.timed_out("The request did not end within its deadline.")
    return errors.failed("The request was aborted by the server.")


def _finish_of(choice: Choice, *, is_stopped: bool) -> RequestFinished:
    order: SubmitRequest = choice.order
    return RequestFinished(
        request_id=order.request_id,
        finish_reason="stop" if is_stopped else "length",
        prompt_tokens=len(order.prompt),
        completion_tokens=len(choice.tokens),
    )
