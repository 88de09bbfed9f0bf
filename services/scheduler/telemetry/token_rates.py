"""Rate of generated tokens. Owns the counts of the last two seconds. Pure."""

from collections import deque

_WINDOW_S = 2.0
"""Time over which the token rate is averaged."""


class TokenRates:
    """Counts generated tokens, for their mean number per second over the last two seconds."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, int]] = deque()
        self._tokens = 0

    def record(self, now_s: float, tokens: int) -> None:
        """Record the tokens of one finished step.

        Args:
            now_s: when it finished.
            tokens: tokens of all sequences together.
        """
        self._entries.append((now_s, tokens))
        self._tokens += tokens
        self._forget(now_s)

    def tokens_per_second(self, now_s: float) -> float:
        """Return the mean number of tokens per second over the last two seconds; 0 when idle.

        Args:
            now_s: the monotonic time in seconds.
        """
        self._forget(now_s)
        return self._tokens / _WINDOW_S

    def _forget(self, now_s: float) -> None:
        while self._entries and now_s - self._entries[0][0] > _WINDOW_S:
            self._tokens -= self._entries.popleft()[1]
