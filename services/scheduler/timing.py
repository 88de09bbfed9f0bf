"""What a step costs, learnt from receipts: sizes of prefill chunks and deadlines follow from it.

Two numbers are kept, exponentially averaged: the time of a decode by the number of rows, and the
time per token of a prefill chunk. A chunk grows at most twofold from one to the next, so that a
model that is slower than thought cannot hold up decodes for long; it shrinks at once.
"""

from shared import limits

_WEIGHT = 0.3
_WEIGHT_WORSE = 0.8
"""A prefill that has become slower (a longer prefix, for one) is believed nearly at once."""
_FIRST_CHUNK_TOKENS = 128
_CHUNK_TOKENS_MIN = 16
_POSITION_STEP = 256
_DEEPER = 1.25
"""A token at twice the depth is expected to cost so much more until that has been measured."""
_STALL_SHARE = 0.9
"""Part of the allowed stall that is planned for; a scrap of a prompt may be taken along on top."""
_CHUNK_IDLE_MS = 1_000.0
"""Even without decodes a chunk ends soon enough for aborts and arrivals to be heard."""


class StepTiming:
    """Learns costs in milliseconds; one per epoch, since another world has other costs."""

    def __init__(self, decode_stall_ms: float) -> None:
        self._decode_stall_ms = decode_stall_ms
        self._decode_ms: dict[int, float] = {}
        self._token_ms: dict[int, float] = {}
        """Per prefill token, by depth in powers of two: attention makes deep tokens cost more."""
        self._largest_chunk = 0

    def prefill_token_ms(self, position: int = 0) -> float:
        """Return the milliseconds per prefill token at this place in a prompt; 0 if unknown."""
        depth = _depth(position)
        if depth in self._token_ms or not self._token_ms:
            return self._token_ms.get(depth, 0.0)
        below = [known for known in self._token_ms if known < depth]
        if not below:
            return self._token_ms[min(self._token_ms)]
        return float(self._token_ms[max(below)] * _DEEPER ** (depth - max(below)))

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

    def chunk_tokens(self, *, decoding: bool, position: int = 0) -> int:
        """Return how many tokens the next step may prefill.

        Args:
            decoding: somebody waits for the step to end.
            position: tokens before the first of them in its prompt.
        """
        if not self._token_ms:
            return _FIRST_CHUNK_TOKENS
        budget_ms = _STALL_SHARE * self._decode_stall_ms
        if not decoding:
            budget_ms = max(budget_ms, _CHUNK_IDLE_MS)
        affordable = int(budget_ms / max(self.prefill_token_ms(position), 1e-6))
        return max(_CHUNK_TOKENS_MIN, min(affordable, 2 * self._largest_chunk))

    def predicted_ms(self, chunk_tokens: int, decodes: int, position: int = 0) -> float | None:
        """Return the expected time of a step, or None while too little is known."""
        if chunk_tokens and not self._token_ms:
            return None
        if decodes and not self._decode_ms:
            return None
        return chunk_tokens * self.prefill_token_ms(position) + self.decode_ms(decodes)

    def deadline_s(self, chunk_tokens: int, decodes: int, position: int = 0) -> float:
        """Return how long a step may take before the world is declared lost."""
        predicted_ms = self.predicted_ms(chunk_tokens, decodes, position)
        if predicted_ms is None:
            return limits.STEP_DEADLINE_MAX_S
        allowed_s = limits.STEP_DEADLINE_FACTOR * predicted_ms / 1_000.0
        return min(max(allowed_s, limits.STEP_DEADLINE_MIN_S), limits.STEP_DEADLINE_MAX_S)

    def learn(self, chunk_tokens: int, decodes: int, busy_ms: float, position: int = 0) -> None:
        """Take in what a step has cost; `position` is where its chunks began, on average."""
        if not chunk_tokens:
            if decodes:
                old = self._decode_ms.get(decodes)
                self._decode_ms[decodes] = _average(old, busy_ms)
            return
        prefill_ms = max(busy_ms - self._least_decode_ms(decodes), 0.1 * busy_ms)
        token_ms = prefill_ms / chunk_tokens
        depth = _depth(position)
        old = self._token_ms.get(depth)
        is_worse = old is not None and token_ms > old
        self._token_ms[depth] = _average(old, token_ms, _WEIGHT_WORSE if is_worse else _WEIGHT)
        self._largest_chunk = max(self._largest_chunk, chunk_tokens)

    def _least_decode_ms(self, rows: int) -> float:
        """Return what a decode of so many rows has taken at least.

        What is not surely the decode's counts as the chunk's: decodes rather wait too short.
        """
        below = [count for count in self._decode_ms if count <= rows]
        return self._decode_ms[max(below)] if below else 0.0


def _depth(position: int) -> int:
    return (position // _POSITION_STEP).bit_length()


def _average(old: float | None, new: float, weight: float = _WEIGHT) -> float:
    return new if old is None else old + weight * (new - old)
