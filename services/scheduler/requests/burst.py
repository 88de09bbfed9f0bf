"""Requests that come together: where nobody runs, the first plan waits for the last of them.

One prompt alone would be prefilled first, by a forward of its own, and the others would wait;
one forward of all of them costs a fraction of that. While anybody runs nothing waits: a plan for
those who come then is made at the end of a step anyway.

That others come is known from a gateway which is reading them, and from requests that have just
ended together: whoever sent those often has the next ready. Of several gateways the last word
counts, whosever it is: a wait that ends early costs little.
"""

from collections import deque

_GAP_S = 0.008
"""Longest wait for the next request of a burst; a gateway sends one every millisecond."""
_BURST_S = 0.025
"""Longest wait of the first."""
_RETURN_S = 0.05
"""Who has not come back so long after an end is not waited for."""


class Burst:
    """Knows until when plans wait for requests that are about to come."""

    def __init__(self) -> None:
        self._ended_at_s: deque[float] = deque()
        """When requests ended that none has followed yet."""
        self._began_s: float | None = None
        self._until_s = 0.0

    def ended(self, now_s: float) -> None:
        """Take in that a request has got its last token."""
        self._forget(now_s)
        self._ended_at_s.append(now_s)

    def arrived(self, now_s: float, *, more_requests_expected: bool) -> None:
        """Take in a request; its gateway may know that more follow."""
        self._forget(now_s)
        if self._ended_at_s:
            self._ended_at_s.popleft()
        if not (more_requests_expected or self._ended_at_s):
            self._began_s = None
            return
        if self._began_s is None:
            self._began_s = now_s
        self._until_s = min(now_s + _GAP_S, self._began_s + _BURST_S)

    def waits_until_s(self, now_s: float) -> float | None:
        """Return when the wait ends, or None when there is none."""
        return self._until_s if self._began_s is not None and now_s < self._until_s else None

    def over(self, now_s: float) -> None:
        """Take in that all who have come are planned for."""
        if self._began_s is not None and now_s >= self._until_s:
            # They were waited for once, and have not come.
            self._ended_at_s.clear()
        self._began_s = None

    def _forget(self, now_s: float) -> None:
        while self._ended_at_s and now_s - self._ended_at_s[0] > _RETURN_S:
            self._ended_at_s.popleft()
