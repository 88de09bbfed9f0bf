"""What it costs when the ranks' draft model reads known text that its rows lack, and how much may.

Each row that reads takes a forward of its own, which takes what another draft would. Reading holds
up whoever decodes in the same step, so long texts are read in pieces, which may take a part of what
a prefill chunk may. What pieces take is told from steps that neither prefill nor verify. What rides
along with a prefill of the same tokens is a part of that prefill's cost and learnt there.
"""

from shared import limits
from shared.configuration.settings import SchedulerConfig

_FIRST_TOKENS = 128
_TOKENS_MIN = 32
_STALL_SHARE = 0.5
"""Part of the allowed stall."""
_GROWTH = 2.0
_FULL = 0.5
"""Who reads so much of what it may shows whether it could be more."""
_WEIGHT = 0.3
_TOKEN_MS_MIN = 1e-5
"""A forward that took no longer than was thought has still shown what tokens take."""


class Reading:
    """Learns in milliseconds; one per epoch, since another world has other costs."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._most = min(limits.FORWARD_TOKENS_MAX, config.step_tokens_max)
        self.tokens_max = min(_FIRST_TOKENS, self._most)
        """So many may be read beside the next step, by rows that lack much."""
        self.token_ms = 0.0
        """What a token takes; 0: unknown."""
        self.forward_ms = 0.0
        """What a forward takes beside its tokens, as it is told; 0: unknown."""
        self._budget_ms = _STALL_SHARE * config.decode_stall_ms

    def cost_ms(self, tokens: int) -> float:
        """Return what it takes a row to read so many tokens; a guess before it was measured."""
        token_ms = self.token_ms or self.forward_ms / _TOKENS_MIN
        return self.forward_ms + tokens * token_ms if tokens else 0.0

    def finished(self, tokens: int, rows: int, excess_ms: float) -> None:
        """Take in a step.

        Args:
            tokens: so many were read ...
            rows: ... by so many rows.
            excess_ms: what it took longer than the same step without.
        """
        excess_ms = max(0.0, excess_ms)
        rest_ms = max(0.0, excess_ms - rows * self.forward_ms)
        self.token_ms = _average(self.token_ms, max(_TOKEN_MS_MIN, rest_ms / tokens))
        left_ms = max(0.0, self._budget_ms - rows * self.forward_ms)
        fitting = int(min(left_ms * tokens / max(rest_ms, 1e-6), float(self._most)))
        if fitting >= self.tokens_max:
            may_grow = tokens >= _FULL * self.tokens_max
            fitting = min(fitting, int(_GROWTH * tokens)) if may_grow else self.tokens_max
        self.tokens_max = min(self._most, max(_TOKENS_MIN, fitting))


def _average(known: float, new: float) -> float:
    return known + _WEIGHT * (new - known) if known else new
