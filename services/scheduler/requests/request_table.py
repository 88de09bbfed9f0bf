"""Request table. Owns the open requests of all gateways; each ends exactly once (I7)."""

import dataclasses
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from weakref import WeakValueDictionary

import msgspec

from services.scheduler.events import Action, SendToGateway
from services.scheduler.requests.request_history import RequestHistory
from services.scheduler.requests.sequence import Sequence, SequenceState
from services.scheduler.requests.tenant_turns import TenantTurns
from services.scheduler.requests.waiting_queue import WaitingQueue
from services.scheduler.speculation.methods import WHY_NOT
from shared.configuration.settings import SchedulerConfig
from shared.errors import InvariantBroken
from shared.identifiers import PeerId, SequenceId
from shared.messages import (
    CachedPrefix,
    RequestAccepted,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    SubmitRequest,
    ToGateway,
    token_ids,
)
from shared.messages.gateway_link import FailureCause, FinishReason

RETRY_AFTER_S = 5.0
"""About the time of a restart or the start of an epoch."""
_MEAN_REQUEST_S = 2.0
"""Assumed duration of a request until some have finished."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the world can serve; a request beyond it is rejected."""

    tokens_max: int
    """Most tokens of prompt and completion."""
    vocabulary_size: int
    """Token ids are below it."""
    can_draft: bool
    """Rows can be rolled back, so drafts can be verified."""


class RequestTable:
    """The open requests of all gateways; reports to each gateway what becomes of its requests."""

    def __init__(
        self, config: SchedulerConfig, waiting: WaitingQueue, actions: list[Action]
    ) -> None:
        self.counters: defaultdict[str, float] = defaultdict(float)
        self._config = config
        self._waiting = waiting
        self.turns = TenantTurns()
        """Whose turn it is, among the tenants of the open requests."""
        self.history = RequestHistory()
        """The requests that ended last."""
        self._actions = actions
        self._open: dict[tuple[PeerId, str], Sequence] = {}
        self._arrivals = 0
        self._waiting_tokens: WeakValueDictionary[tuple[str, int], array[int]] = (
            WeakValueDictionary()
        )
        """Tokens of waiting requests by tenant and hash, which equal ones share."""
        self._mean_request_s = _MEAN_REQUEST_S

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._open)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a copy of the open sequences."""
        return iter(list(self._open.values()))

    def find(self, gateway: PeerId, request_id: str) -> Sequence | None:
        """Return the sequence of a gateway's request by the gateway's id, or None if not open."""
        return self._open.get((gateway, request_id))

    def of_gateway(self, gateway: PeerId) -> list[Sequence]:
        """Return the open sequences of one gateway."""
        return [sequence for sequence in self._open.values() if sequence.gateway == gateway]

    def accept(
        self, gateway: PeerId, message: SubmitRequest, *, now_s: float, bounds: RequestLimits
    ) -> None:
        """Queue a request, or reject it with a reason.

        Args:
            gateway: the gateway that sent it.
            message: the request, which is not open.
            now_s: time of arrival.
            bounds: limits of the world.
        """
        tokens = token_ids.unpack(message.prompt + message.generated)
        if rejection := _find_rejection(message, tokens, bounds):
            self.reject(gateway, message.request_id, *rejection)
            return
        sequence = Sequence(
            sequence_id=SequenceId(self._arrivals + 1),
            gateway=gateway,
            request=msgspec.structs.replace(message, prompt=b"", generated=b""),
            tokens=self._share_tokens(message.tenant, tokens),
            prompt_tokens=message.prompt_tokens,
            tokens_max=min(message.prompt_tokens + message.max_tokens, bounds.tokens_max),
            arrival_number=self._arrivals + 1,
            accepted_at_s=now_s,
            deadline_at_s=now_s + message.deadline_s,
            queue_deadline_at_s=self._queue_deadline_at_s(message, now_s),
            stop_ids=frozenset(message.stop_ids),
        )
        # A resumed request is accepted in any case, because it ran before.
        detail = "" if message.generated else self._waiting.limits.explain_refusal(sequence)
        if detail:
            self.reject(gateway, message.request_id, "queue_full", detail, self._retry_after_s())
            return
        self._arrivals += 1
        self._open[gateway, message.request_id] = sequence
        self.turns.enter(sequence.tenant, message.weight, self._waiting.tenants)
        ahead = self._waiting.add(sequence)
        self.counters["requests_accepted_total"] += 1
        self.counters["prompt_tokens_total"] += message.prompt_tokens
        self._send(gateway, RequestAccepted(request_id=message.request_id, queued_ahead=ahead))
        if message.generated:
            self._end_if_complete(sequence)

    def reject(
        self,
        gateway: PeerId,
        request_id: str,
        cause: str,
        detail: str,
        retry_after_s: float | None = None,
    ) -> None:
        """Tell a gateway that its request is not accepted, and count it by cause.

        Args:
            gateway: the gateway that sent it.
            request_id: the gateway's id of the request.
            cause: a value of RequestRejected.cause.
            detail: a sentence for the client.
            retry_after_s: seconds after which another try may succeed; None: unknown.
        """
        self.counters[f"requests_rejected_{cause}_total"] += 1
        self._send(
            gateway,
            RequestRejected(
                request_id=request_id,
                cause=cause,  # type: ignore[arg-type]
                detail=detail,
                retry_after_s=retry_after_s,
            ),
        )

    def report_admitted(self, sequence: Sequence, step: tuple[int, int], now_s: float) -> None:
        """Tell the gateway that a request has started, and how many prompt tokens were cached.

        The caller calls it once per request, at the first admission of its sequence.

        Args:
            sequence: of the request.
            step: epoch and id of the step that admits it.
            now_s: the monotonic time in seconds.
        """
        sequence.started_at_s, sequence.first_step = now_s, step
        sequence.queue_deadline_at_s = math.inf
        cached = sequence.blocks.cached or CachedPrefix()
        name = sequence.request.request_id
        self._send(sequence.gateway, RequestAdmitted(request_id=name, cached=cached))

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a request that has its completion or was aborted, and report it to its gateway.

        Args:
            sequence: its sequence, which was removed from the batch and the queue.
            reason: why the completion ends there.

        Raises:
            InvariantBroken: the request has ended already.
        """
        self._close(sequence, reason)
        self.counters[f"requests_finished_{reason}_total"] += 1
        self._send(
            sequence.gateway,
            RequestFinished(
                request_id=sequence.request.request_id,
                finish_reason=reason,
                prompt_tokens=sequence.prompt_tokens,
                completion_tokens=sequence.completion_tokens,
                cached=sequence.blocks.cached or CachedPrefix(),
                drafts_accepted=sequence.draft_state.accepted if sequence.draft_state else 0,
                drafts_rejected=sequence.draft_state.rejected if sequence.draft_state else 0,
            ),
        )

    def discard(self, sequence: Sequence) -> None:
        """End a request whose gateway is lost, without a message to the gateway.

        A gateway that reconnects submits its requests again, and would mistake the message for the
        end of the new request.
        """
        self._close(sequence, "abort")
        self.counters["requests_finished_abort_total"] += 1

    def fail(self, sequence: Sequence, cause: FailureCause, detail: str) -> None:
        """End a request with an error, and report it to its gateway.

        Args:
            sequence: its sequence, which was removed from the batch and the queue.
            cause: kind of the failure.
            detail: a sentence for the client.

        Raises:
            InvariantBroken: the request has ended already.
        """
        self._close(sequence, cause)
        self.counters["requests_failed_total"] += 1
        self._send(
            sequence.gateway,
            RequestFailed(request_id=sequence.request.request_id, cause=cause, detail=detail),
        )

    def expired(self, now_s: float) -> Iterator[tuple[Sequence, FailureCause, str]]:
        """Yield each sequence past a deadline, with the cause and a sentence for the client.

        One deadline is for the whole request, and one for the wait for its first slot.

        Args:
            now_s: the monotonic time in seconds.
        """
        for sequence in self:
            if now_s > sequence.deadline_at_s:
                detail = f"Not finished within {sequence.request.deadline_s:.0f} s."
                yield sequence, "deadline", detail
            elif now_s > sequence.queue_deadline_at_s:
                waited_s = self._config.queue_deadline_s
                detail = f"Waited {waited_s:.0f} s for a slot, which is the longest allowed."
                yield sequence, "queue_deadline", detail

    def suspects(self, ran: Iterable[Sequence], cause: str) -> Iterator[tuple[Sequence, str]]:
        """Yield each sequence that ran without a token in several failed epochs in a row.

        A kernel may crash on one prompt only, and the other requests should be served. The limit is
        one below `epochs_failed_max`, so that one more epoch shows whether these were the cause.

        Args:
            ran: sequences that ran when an epoch ended.
            cause: why it ended.

        Yields:
            The sequence, and a sentence for the client.
        """
        lost_max = max(1, self._config.epochs_failed_max - 1)
        for sequence in ran:
            sequence.epochs_without_token += 1
            if sequence.epochs_without_token >= lost_max:
                detail = (
                    f"{lost_max} epochs in a row have failed while this request ran, and it got no "
                    f"token in any of them. The last one: {cause}"
                )
                yield sequence, detail[:4_000]

    def record_duration(self, seconds: float) -> None:
        """Record the seconds that a finished request ran, from which Retry-After is estimated."""
        self._mean_request_s += 0.1 * (seconds - self._mean_request_s)

    def check_invariants(self) -> None:
        """Assert that the queue, its limits and the turns know exactly the open requests."""
        waiting = [one for one in self if one.state is SequenceState.WAITING]
        for sequence in self:
            assert sequence.state is not SequenceState.ENDED, sequence
            assert sequence.samples_in_flight >= 0, sequence
        assert len(waiting) == len(self._waiting), (len(waiting), len(self._waiting))
        self._waiting.limits.check_invariants(waiting)
        assert len(self.turns) == len({sequence.tenant for sequence in self})

    def _end_if_complete(self, sequence: Sequence) -> None:
        """Finish a resumed request that was complete when its scheduler was lost."""
        is_stopped = sequence.tokens[-1] in sequence.stop_ids
        if is_stopped or len(sequence.tokens) >= sequence.tokens_max:
            self._waiting.remove(sequence)
            self.finish(sequence, "stop" if is_stopped else "length")

    def _share_tokens(self, tenant: str, tokens: "array[int]") -> "array[int]":
        """Return equal tokens of a waiting request of the same tenant, else these tokens.

        Several completions of one prompt are requests of their own.
        """
        packed = tokens.tobytes()
        known = self._waiting_tokens.get((tenant, hash(packed)))
        if known is not None and known.tobytes() == packed:
            return known
        self._waiting_tokens[tenant, hash(packed)] = tokens
        return tokens

    def _queue_deadline_at_s(self, message: SubmitRequest, now_s: float) -> float:
        # A request with generated tokens ran before its scheduler was lost.
        return math.inf if message.generated else now_s + self._config.queue_deadline_s

    def _retry_after_s(self) -> float:
        waves = len(self._waiting) / self._config.running_sequences_max
        return min(120.0, max(1.0, waves * self._mean_request_s))

    def _close(self, sequence: Sequence, end: str) -> None:
        if sequence.state is SequenceState.ENDED:
            raise InvariantBroken(f"request {sequence.request.request_id} has ended already")
        sequence.state = SequenceState.ENDED
        self.history.add(sequence, end)
        self.turns.leave(sequence.tenant)
        del self._open[sequence.gateway, sequence.request.request_id]

    def _send(self, gateway: PeerId, message: ToGateway) -> None:
        self._actions.append(SendToGateway(gateway, message))


def _find_rejection(
    message: SubmitRequest, tokens: "array[int]", bounds: RequestLimits
) -> tuple[str, str] | None:
    """Return the cause and detail of a rejection if this world cannot serve a request, or None."""
    drafts = token_ids.unpack(message.prediction)
    if not token_ids.all_below(tokens + drafts if drafts else tokens, bounds.vocabulary_size):
        # The embedding lookup of such an id would fail on every rank and end the epoch.
        size = bounds.vocabulary_size
        return "invalid", f"A token id is negative or not below the vocabulary's size, {size}."
    method = message.speculation.method
    # A resumed request is accepted: drafts change the speed of its tokens, not the tokens.
    if method not in ("default", "off") and not (bounds.can_draft or message.generated):
        return "no_drafts", (
            f"speculation.method: {method} is not supported by this model, which cannot roll back "
            f"({WHY_NOT}): leave it out."
        )
    if detail := _explain_length(message, bounds.tokens_max):
        return "too_long", detail
    return None


def _explain_length(message: SubmitRequest, tokens_max: int) -> str:
    """Return why a request is too long; "" if it is not."""
    if message.generated_tokens > message.max_tokens:
        return (
            f"{message.generated_tokens} tokens were generated already, "
            f"more than max_tokens {message.max_tokens}."
        )
    if message.prompt_tokens >= tokens_max:
        return (
            # Clients such as litellm know the first sentence.
            f"This model's maximum context length is {tokens_max} tokens. However, the prompt has "
            f"{message.prompt_tokens} tokens, and a completion needs room too: shorten the prompt."
        )
    return ""
