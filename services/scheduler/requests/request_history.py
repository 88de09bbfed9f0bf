"""History of the last requests. Owns when each was accepted, admitted and ended. Pure."""

from collections import deque
from collections.abc import Iterable

from services.scheduler.requests.sequence import Sequence
from shared import limits
from shared.messages import RecordedRequest


class RequestHistory:
    """The requests that ended last, bounded in number."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """Time of the present event on the scheduler's clock; set before each."""
        self._ended: deque[RecordedRequest] = deque(maxlen=limits.RECORDED_REQUESTS_MAX)

    def add(self, sequence: Sequence, end: str) -> None:
        """Add a request that ends now.

        Args:
            sequence: its sequence.
            end: its finish reason, or the cause of its failure.
        """
        self._ended.append(record_of(sequence, end, self.now_s))

    def report(self, open_requests: Iterable[Sequence], since_s: float) -> list[RecordedRequest]:
        """Return the requests that ended after a time, and the open ones, oldest first.

        Args:
            open_requests: all open ones.
            since_s: the time.
        """
        ended = [one for one in self._ended if (one.ended_at_s or 0.0) > since_s]
        found = [*ended, *(record_of(one) for one in open_requests)]
        return sorted(found, key=lambda one: one.accepted_at_s)[-limits.RECORDED_REQUESTS_MAX :]


def record_of(
    sequence: Sequence, end: str = "", ended_at_s: float | None = None
) -> RecordedRequest:
    """Return the record of a request.

    Args:
        sequence: its sequence.
        end: its finish reason, or the cause of its failure; "": it is open.
        ended_at_s: when it ended; None: it is open.
    """
    return RecordedRequest(
        request_id=sequence.request.request_id,
        prompt_tokens=sequence.prompt_tokens,
        completion_tokens=sequence.completion_tokens,
        accepted_at_s=sequence.accepted_at_s,
        started_at_s=sequence.started_at_s or None,
        first_epoch=sequence.first_step[0],
        first_step_id=sequence.first_step[1],
        first_token_at_s=sequence.first_token_at_s or None,
        ended_at_s=ended_at_s,
        end=end,
    )
