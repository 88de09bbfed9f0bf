"""What a step costs, learnt from receipts: sizes of prefill chunks and deadlines follow from it.

Kept are the time of a decode by the number of rows, exponentially averaged, and of prefill chunks
the time per token and the size that it was measured at. A chunk grows at most twofold from one to
the next, so that a model that is slower than thought cannot hold up decodes for long; it shrinks at
once.

A forward has a fixed cost too: where the host or the memory bounds it, 16 tokens take as long as
256. Time per token alone would then make small chunks look dear, and chunks small, for good. So
what is smaller, no slower than the size last measured and dearer per token teaches nothing, and a
chunk that left much of its time unused is followed by a larger one whatever its time per token. One
that is smaller and cheaper per token all the same says that the device is faster than it was.
"""

import dataclasses
import math

_WEIGHT = 0.5
_WEIGHT_WORSE = 0.8
"""A prefill that has become slower (a longer prefix, for one) is believed nearly at once."""
_OUTLIER = 4.0
"""So many times slower than known is believed when it happens twice: a kernel that is compiled for
its first use takes seconds once."""
_SLACK = 0.8
_GROWTH = 1.5
"""A chunk that took at most this share of its time is followed by one so many times as large."""
_ROUND_TOKENS = 64
_ROUND_FROM_TOKENS = 128
"""Sizes that come again let a device reuse what it has prepared for a shape."""
_FIRST_CHUNK_TOKENS = 128
_CHUNK_TOKENS_MIN = 16
_POSITION_STEP = 256
_DEEPER = 1.25
"""A token at twice the depth is expected to cost so much more until that has been measured."""
_STALL_SHARE = 0.9
"""Part of the allowed stall that is planned for; a scrap of a prompt may be taken along on top."""
_CHUNK_IDLE_MS = 1_000.0
"""Even without decodes a chunk ends soon enough for aborts and arrivals to be heard."""

_TOGETHER_MS = 500.0
"""Longest step of several prompts while nobody decodes: the first of them waits for the last."""


@dataclasses.dataclass(slots=True)
class _ChunkCost:
    """What chunks of one depth cost, in milliseconds."""

    tokens: int
    """Size of the last one that taught something."""
    whole_ms: float
    """How long that one took."""
    token_ms: float
    """Averaged over all."""
    suspicion: bool = False
    """The last one was an outlier."""

    def learn(self, tokens: int, whole_ms: float) -> None:
        """Take in one chunk."""
        token_ms = whole_ms / tokens
        seems_dear = token_ms >= self.token_ms
        if tokens < self.tokens and whole_ms <= self.whole_ms and seems_dear:
            self.suspicion = False
            return
        if token_ms > _OUTLIER * self.token_ms and not self.suspicion:
            self.suspicion = True
            return
        weight = _WEIGHT_WORSE if token_ms > self.token_ms else _WEIGHT
        self.token_ms = _average(self.token_ms, token_ms, 1.0 if self.suspicion else weight)
        self.tokens, self.whole_ms = tokens, whole_ms
        self.suspicion = False

    def affordable(self, budget_ms: float, deeper: float) -> int:
        """Return how many tokens may be tried, each `deeper` times as dear as here."""
        tokens = int(budget_ms / max(self.token_ms * deeper, 1e-6))
        if deeper <= 1.0 and self.whole_ms <= _SLACK * budget_ms:
            tokens = max(tokens, int(_GROWTH * self.tokens))
        return tokens


class StepTiming:
    """Learns costs in milliseconds; one per epoch, since another world has other costs."""

    def __init__(self, decode_stall_ms: float) -> None:
        self._decode_stall_ms = decode_stall_ms
        self._decode_ms: dict[int, float] = {}
        self._chunks: dict[int, _ChunkCost] = {}
        """By depth in powers of two: attention makes deep tokens cost more."""
        self._largest_chunk = 0

    def prefill_token_ms(self, position: int = 0) -> float:
        """Return the milliseconds per prefill token at this place in a prompt; 0 if unknown."""
        if not self._chunks:
            return 0.0
        cost, factor = self._nearest(position)
        return cost.token_ms * factor

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
        if not self._chunks:
            return _FIRST_CHUNK_TOKENS
        budget_ms = _STALL_SHARE * self._decode_stall_ms
        if not decoding:
            budget_ms = max(budget_ms, _CHUNK_IDLE_MS)
        cost, factor = self._nearest(position)
        tokens = min(cost.affordable(budget_ms, factor), 2 * self._largest_chunk)
        if tokens >= _ROUND_FROM_TOKENS:
            tokens -= tokens % _ROUND_TOKENS
        return max(_CHUNK_TOKENS_MIN, tokens)

    def together_tokens(self, position: int = 0) -> float:
        """Return how many tokens several prompts may have that a step reads while nobody decodes.

        Args:
            position: tokens before the first of them in its prompt.
        """
        token_ms = self.prefill_token_ms(position)
        return _TOGETHER_MS / token_ms if token_ms else math.inf

    def predicted_ms(self, chunk_tokens: int, decodes: int, position: int = 0) -> float | None:
        """Return the expected time of a step, or None while too little is known."""
        if chunk_tokens and not self._chunks:
            return None
        if decodes and not self._decode_ms:
            return None
        return chunk_tokens * self.prefill_token_ms(position) + self.decode_ms(decodes)

    def learn(self, chunk_tokens: int, decodes: int, busy_ms: float, position: int = 0) -> None:
        """Take in what a step has cost; `position` is where its chunks began, on average."""
        if not chunk_tokens:
            if decodes:
                old = self._decode_ms.get(decodes)
                self._decode_ms[decodes] = _average(old, busy_ms)
            return
        prefill_ms = max(busy_ms - self._least_decode_ms(decodes), 0.1 * busy_ms)
        depth = _depth(position)
        if depth in self._chunks:
            self._chunks[depth].learn(chunk_tokens, prefill_ms)
        else:
            self._chunks[depth] = _ChunkCost(chunk_tokens, prefill_ms, prefill_ms / chunk_tokens)
        self._largest_chunk = max(self._largest_chunk, chunk_tokens)

    def _nearest(self, position: int) -> tuple[_ChunkCost, float]:
        """Return what is known nearest to a depth, and how much more a token costs here."""
        depth = _depth(position)
        known = max((one for one in self._chunks if one <= depth), default=min(self._chunks))
        return self._chunks[known], float(_DEEPER ** max(0, depth - known))

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
