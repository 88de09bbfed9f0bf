"""The requests of all gateways; each accepted one ends exactly once (invariant I7)."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator

from services.scheduler.events import Action, SendToGateway
from services.scheduler.requests.sequence import Sequence, SequenceState
from services.scheduler.requests.waiting_queue import WaitingQueue
from services.scheduler.speculation.requirements import WHY_NOT
from shared.configuration.settings import SchedulerConfig
from shared.errors import InvariantBroken
from shared.identifiers import PeerId, SequenceId
from shared.messages import (
    AbortRequest,
    CachedPrefix,
    RequestAccepted,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    SubmitRequest,
    ToGateway,
)
from shared.messages.gateway_link import FailureCause, FinishReason

RETRY_AFTER_S = 5.0
"""A restart or a new epoch takes about so long."""
_MEAN_REQUEST_S = 2.0
"""Taken for a request's time until some have finished."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What a request must stay within to be accepted."""

    tokens: int
    """Longest prompt plus completion that the world can hold."""
    vocabulary: int
    """Token ids are below it."""
    can_draft: bool
    """Rows can be cut back, so that drafts can be verified."""


class RequestTable:
    """Open requests by (gateway, request id), and the queue of those that wait."""

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue, out: list[Action]) -> None:
        self.counters: defaultdict[str, float] = defaultdict(float)
        self._config = config
        self._waiting = waiting
        self._out = out
        self._open: dict[tuple[PeerId, str], Sequence] = {}
        self._arrivals = 0
        self._mean_request_s = _MEAN_REQUEST_S

    def __len__(self) -> int:
        """Return how many requests are open."""
        return len(self._open)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a copy of the open sequences."""
        return iter(list(self._open.values()))

    def find(self, gateway: PeerId, message: AbortRequest) -> Sequence | None:
        """Return the open sequence that a message names, or None when it has ended or never was."""
        return self._open.get((gateway, message.request_id))

    def has(self, gateway: PeerId, request_id: str) -> bool:
        """Tell whether a request is open."""
        return (gateway, request_id) in self._open

    def of_gateway(self, gateway: PeerId) -> list[Sequence]:
        """Return the open sequences of one gateway."""
        return [sequence for sequence in self._open.values() if sequence.gateway == gateway]

    def accept(
        self, gateway: PeerId, message: SubmitRequest, *, now_s: float, bounds: Bounds
    ) -> None:
        """Queue a request that is not open, or reject it with the reason.

        Args:
            gateway: who asks.
            message: what is asked for.
            now_s: time of arrival.
            bounds: what the world can hold.
        """
        if refusal := _refusal(message, bounds):
            self.reject(gateway, message.request_id, *refusal)
            return
        if len(self._waiting) >= self._config.waiting_requests_max:
            detail = f"{len(self._waiting)} requests are waiting, which is the most allowed."
            self.reject(gateway, message.request_id, "queue_full", detail, self._wait_s())
            return
        self._arrivals += 1
        sequence = Sequence(
            sequence_id=SequenceId(self._arrivals),
            gateway=gateway,
            request=message,
            tokens=[*message.prompt, *message.generated],
            tokens_max=min(len(message.prompt) + message.max_tokens, bounds.tokens),
            arrival=self._arrivals,
            deadline_at_s=now_s + message.deadline_s,
            queue_deadline_at_s=self._queue_deadline_at_s(message, now_s),
            stop_ids=frozenset(message.stop_ids),
        )
        self._open[gateway, message.request_id] = sequence
        ahead = self._waiting.add(sequence)
        self.counters["requests_accepted_total"] += 1
        self.counters["prompt_tokens_total"] += len(message.prompt)
        self._say(gateway, RequestAccepted(request_id=message.request_id, queued_ahead=ahead))
        self._end_if_complete(sequence)

    def reject(
        self,
        gateway: PeerId,
        request_id: str,
        cause: str,
        detail: str,
        retry_after_s: float | None = None,
    ) -> None:
        """Refuse a request before it starts."""
        self.counters[f"requests_rejected_{cause}_total"] += 1
        self._say(
            gateway,
            RequestRejected(
                request_id=request_id,
                cause=cause,  # type: ignore[arg-type]
                detail=detail,
                retry_after_s=retry_after_s,
            ),
        )

    def admitted(self, sequence: Sequence) -> None:
        """Tell the gateway that a request runs for the first time, and what was found of it."""
        sequence.queue_deadline_at_s = math.inf
        cached = sequence.blocks.cached or CachedPrefix()
        name = sequence.request.request_id
        self._say(sequence.gateway, RequestAdmitted(request_id=name, cached=cached))

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a request with a finish reason. The caller has taken it off batch or queue."""
        self._close(sequence)
        self.counters[f"requests_finished_{reason}_total"] += 1
        self._say(
            sequence.gateway,
            RequestFinished(
                request_id=sequence.request.request_id,
                finish_reason=reason,
                prompt_tokens=sequence.prompt_tokens,
                completion_tokens=sequence.completion_tokens,
                cached=sequence.blocks.cached or CachedPrefix(),
                drafts_accepted=sequence.drafting.accepted if sequence.drafting else 0,
                drafts_rejected=sequence.drafting.rejected if sequence.drafting else 0,
            ),
        )

    def forget(self, sequence: Sequence) -> None:
        """End a request whose gateway is gone, without a word.

        A gateway that has come back under its old name meanwhile has submitted it again: it would
        take what is said here for that one's end.
        """
        self._close(sequence)
        self.counters["requests_finished_abort_total"] += 1

    def fail(self, sequence: Sequence, cause: FailureCause, detail: str) -> None:
        """End a request that cannot be completed. The caller has taken it off batch or queue."""
        self._close(sequence)
        self.counters["requests_failed_total"] += 1
        self._say(
            sequence.gateway,
            RequestFailed(request_id=sequence.request.request_id, cause=cause, detail=detail),
        )

    def overdue(self, now_s: float) -> Iterator[tuple[Sequence, FailureCause, str]]:
        """Return whose time is over, as what it fails, and how long that was."""
        for sequence in self:
            if now_s > sequence.deadline_at_s:
                detail = f"Not finished within {sequence.request.deadline_s:.0f} s."
                yield sequence, "deadline", detail
            elif now_s > sequence.queue_deadline_at_s:
                waited_s = self._config.queue_deadline_s
                detail = f"Waited {waited_s:.0f} s for a slot, which is the longest allowed."
                yield sequence, "queue_deadline", detail

    def learn_duration(self, seconds: float) -> None:
        """Take in how long a finished request ran, for Retry-After."""
        self._mean_request_s += 0.1 * (seconds - self._mean_request_s)

    def _end_if_complete(self, sequence: Sequence) -> None:
        """End a resumed request that was complete when the scheduler was lost."""
        generated = sequence.request.generated
        if generated and generated[-1] in sequence.stop_ids:
            self._waiting.remove(sequence)
            self.finish(sequence, "stop")
        elif len(sequence.tokens) >= sequence.tokens_max:
            self._waiting.remove(sequence)
            self.finish(sequence, "length")

    def _queue_deadline_at_s(self, message: SubmitRequest, now_s: float) -> float:
        # Who has tokens has waited already: it ran before its scheduler was lost.
        return math.inf if message.generated else now_s + self._config.queue_deadline_s

    def _wait_s(self) -> float:
        waves = len(self._waiting) / self._config.running_sequences_max
        return min(120.0, max(1.0, waves * self._mean_request_s))

    def _close(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.ENDED:
            raise InvariantBroken(f"request {sequence.request.request_id} ends twice")
        sequence.state = SequenceState.ENDED
        del self._open[sequence.gateway, sequence.request.request_id]

    def _say(
        self,
        gateway: PeerId,
        message: ToGateway,
    ) -> None:
        self._out.append(SendToGateway(gateway, message))


def _refusal(message: SubmitRequest, bounds: Bounds) -> tuple[str, str] | None:
    """Return (cause, detail) of what this world can never do for a request; None if it can."""
    if max(itertools.chain(message.prompt, message.generated)) >= bounds.vocabulary:
        # Past this point it would end the world: no rank has a row of that number to look up.
        return "invalid", f"A token id is not below the vocabulary's size, {bounds.vocabulary}."
    wish = message.speculation.method
    # One that ran before goes on: drafts change how fast its tokens come, never which.
    if wish not in ("default", "off") and not (bounds.can_draft or message.generated):
        return "no_drafts", (
            f"speculation.method: {wish} is not supported by this model, which cannot roll back "
            f"({WHY_NOT}): leave it out."
        )
    if detail := _wrong_length(message, bounds.tokens):
        return "too_long", detail
    return None


def _wrong_length(message: SubmitRequest, tokens_limit: int) -> str:
    if len(message.generated) > message.max_tokens:
        return (
            f"{len(message.generated)} tokens were generated already, "
            f"more than max_tokens {message.max_tokens}."
        )
    if len(message.prompt) >= tokens_limit:
        return (
            f"The prompt has {len(message.prompt)} tokens; the longest that leaves room for "
            f"a completion has {max(0, tokens_limit - 1)}."
        )
    return ""
