"""What a step costs, learnt from receipts: sizes of prefill chunks and deadlines follow from it.

Two numbers are kept, exponentially averaged: the time of a decode by the number of rows, and the
time per token of a prefill chunk. A chunk grows at most twofold from one to the next, so that a
model that is slower than thought cannot hold up decodes for long; it shrinks at once.
"""

from shared import limits

_WEIGHT = 0.3
_FIRST_CHUNK_TOKENS = 128
_CHUNK_TOKENS_MIN = 16
_CHUNK_IDLE_MS = 1_000.0
"""Even without decodes a chunk ends soon enough for aborts and arrivals to be heard."""


class StepTiming:
    """Learns costs in milliseconds; one per epoch, since another world has other costs."""

    def __init__(self, decode_stall_ms: float) -> None:
        self._decode_stall_ms = decode_stall_ms
        self._decode_ms: dict[int, float] = {}
        self._token_ms: float | None = None
        self._largest_chunk = 0

    @property
    def prefill_token_ms(self) -> float:
        """Milliseconds per prefill token; 0 before the first."""
        return self._token_ms or 0.0

    def decode_ms(self, rows: int) -> float:
        """Return the expected time of a decode of so many rows; 0 when nothing is known."""
        if rows == 0 or not self._decode_ms:
            return 0.0
        if rows in self._decode_ms:
            return self._decode_ms[rows]
        below = [count for count in self._decode_ms if count < rows]
        nearest = max(below) if below else min(self._decode_ms)
        # Between "rows cost nothing" (a GPU) and "rows cost their number": never less than the
        # nearest.
        return self._decode_ms[nearest] * (1.0 if nearest > rows else max(1.0, rows / nearest))

    def chunk_tokens(self, *, decoding: bool) -> int:
        """Return how many tokens the next step may prefill."""
        if self._token_ms is None:
            return _FIRST_CHUNK_TOKENS
        budget_ms = self._decode_stall_ms
        if not decoding:
            budget_ms = max(budget_ms, _CHUNK_IDLE_MS)
        affordable = int(budget_ms / max(self._token_ms, 1e-6))
        return max(_CHUNK_TOKENS_MIN, min(affordable, 2 * self._largest_chunk))

    def predicted_ms(self, chunk_tokens: int, decodes: int) -> float | None:
        """Return the expected time of a step, or None while too little is known."""
        if chunk_tokens and self._token_ms is None:
            return None
        if decodes and not self._decode_ms:
            return None
        return chunk_tokens * (self._token_ms or 0.0) + self.decode_ms(decodes)

    def deadline_s(self, chunk_tokens: int, decodes: int) -> float:
        """Return how long a step may take before the world is declared lost."""
        predicted_ms = self.predicted_ms(chunk_tokens, decodes)
        if predicted_ms is None:
            return limits.STEP_DEADLINE_MAX_S
        allowed_s = limits.STEP_DEADLINE_FACTOR * predicted_ms / 1_000.0
        return min(max(allowed_s, limits.STEP_DEADLINE_MIN_S), limits.STEP_DEADLINE_MAX_S)

    def learn(self, chunk_tokens: int, decodes: int, busy_ms: float) -> None:
        """Take in what a step has cost."""
        if not chunk_tokens:
            if decodes:
                old = self._decode_ms.get(decodes)
                self._decode_ms[decodes] = _average(old, busy_ms)
            return
        prefill_ms = max(busy_ms - self._least_decode_ms(decodes), 0.1 * busy_ms)
        self._token_ms = _average(self._token_ms, prefill_ms / chunk_tokens)
        self._largest_chunk = max(self._largest_chunk, chunk_tokens)

    def _least_decode_ms(self, rows: int) -> float:
        """Return what a decode of so many rows has taken at least.

        What is not surely the decode's counts as the chunk's: decodes rather wait too short.
        """
        below = [count for count in self._decode_ms if count <= rows]
        return self._decode_ms[max(below)] if below else 0.0


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
