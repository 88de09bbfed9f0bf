"""Reading cost. Owns the cost and the size of reads by rows of the ranks' draft model.

Each row that reads takes a forward of its own, which costs as much as a draft. Reads delay the
decodes of the same step, so a row reads a long text in pieces that take a part of the time of a
prefill chunk. The cost is measured in steps that neither prefill nor verify; reads beside a prefill
of the same tokens count as prefill.
"""

from shared import limits
from shared.configuration.settings import SchedulerConfig

_FIRST_TOKENS = 128
_TOKENS_MIN = 32
_STALL_SHARE = 0.5
"""Part of the allowed stall that reads may take."""
_GROWTH = 2.0
_FULL = 0.5
"""Part of the allowed size that a read needs so that the size may grow."""
_WEIGHT = 0.3
_TOKEN_MS_MIN = 1e-5
"""Lower bound of a measured time per token, since 0 means unknown."""


class ReadingCost:
    """Measures how long rows of the draft model take to read, and limits the tokens of a read.

    In a read a row of the ranks' draft model takes in known tokens that it lacks, like a prefill.
    The measurements are of one epoch, because another world has other times.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._most = min(limits.FORWARD_TOKENS_MAX, config.step_tokens_max)
        self.tokens_max = min(_FIRST_TOKENS, self._most)
        """Most tokens that all rows which lack many tokens may read together in the next step."""
        self.token_ms = 0.0
        """Milliseconds per token read; 0: unknown."""
        self.forward_ms = 0.0
        """Fixed milliseconds of a forward of the draft model, set by the caller; 0: unknown."""
        self._budget_ms = _STALL_SHARE * config.decode_stall_ms

    def cost_ms(self, tokens: int) -> float:
        """Return the expected milliseconds for a row of the draft model to read some tokens.

        Args:
            tokens: number of tokens; 0 cost nothing.
        """
        token_ms = self.token_ms or self.forward_ms / _TOKENS_MIN
        return self.forward_ms + tokens * token_ms if tokens else 0.0

    def record_step(self, tokens: int, rows: int, excess_ms: float) -> None:
        """Record the duration of a step with reads; adjust the time per token and `tokens_max`.

        Args:
            tokens: number of tokens that were read.
            rows: number of rows of the draft model that read.
            excess_ms: milliseconds that the step took more than one without reads.
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
