"""Request bursts. Owns how long an idle batch waits for more requests before its first plan.

Without the wait the first prompt would be prefilled alone and the others would wait for it; one
forward of all prompts costs a fraction of that. While sequences run there is no wait, because the
next plan is made at the end of a step anyway.

More requests are expected when a gateway says so, and after requests have ended together, since
their clients often send the next ones at once. With several gateways the last message counts,
because ending a wait early costs little.
"""

from collections import deque

_GAP_S = 0.008
"""Longest wait for the next request of a burst; a gateway sends one every millisecond."""
_BURST_S = 0.025
"""Longest wait of the first request of a burst."""
_RETURN_S = 0.05
"""How long after the end of a request another one is expected from its client."""


class Burst:
    """Decides how long an idle batch waits for more requests before its first plan.

    Requests that arrive at nearly the same time (a burst) so run in one batch. The wait begins with
    a request after which another one is expected. It ends a few milliseconds after the last request
    that arrived, and after 25 ms at the latest.
    """

    def __init__(self) -> None:
        self._ended_at_s: deque[float] = deque()
        """Ends of requests that no new request has followed."""
        self._began_s: float | None = None
        """When the wait began; None: there is no wait."""
        self._until_s = 0.0

    def record_end(self, now_s: float) -> None:
        """Record that a request has ended, so its client may send the next one soon.

        Args:
            now_s: when it ended. A new request is expected for 50 ms from then on.
        """
        self._forget(now_s)
        self._ended_at_s.append(now_s)

    def record_arrival(self, now_s: float, *, more_requests_expected: bool) -> None:
        """Record a new request; begin or extend the wait for others if any are expected.

        If none is expected, a wait that has begun ends.

        Args:
            now_s: when it arrived.
            more_requests_expected: its gateway is about to send another one.
        """
        self._forget(now_s)
        if self._ended_at_s:
            self._ended_at_s.popleft()
        if not (more_requests_expected or self._ended_at_s):
            self._began_s = None
            return
        if self._began_s is None:
            self._began_s = now_s
        self._until_s = min(now_s + _GAP_S, self._began_s + _BURST_S)

    def wait_until_s(self, now_s: float) -> float | None:
        """Return the time at which the wait for further requests ends; None: plans need not wait.

        Args:
            now_s: the monotonic time in seconds; a wait whose end has passed counts as none.
        """
        return self._until_s if self._began_s is not None and now_s < self._until_s else None

    def finish_wait(self, now_s: float) -> None:
        """End the wait for further requests, because those that have arrived are being planned.

        Args:
            now_s: the monotonic time in seconds. If the wait has run out by then, the requests it
                was for are no longer expected, so they cause no further wait.
        """
        if self._began_s is not None and now_s >= self._until_s:
            # The expected requests did not arrive, so no further wait is made for them.
            self._ended_at_s.clear()
        self._began_s = None

    def _forget(self, now_s: float) -> None:
        while self._ended_at_s and now_s - self._ended_at_s[0] > _RETURN_S:
            self._ended_at_s.popleft()
