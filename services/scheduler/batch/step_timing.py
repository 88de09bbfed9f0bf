"""Step timing. Owns the measured times of steps, from which chunk sizes and deadlines follow.

A decode has an exponential average per number of rows, and a prefill chunk a time per token and
the size at which it was measured. A chunk is at most twice as large as the one before, so that a
slow model does not delay decodes for long; it shrinks at once.

A forward has a fixed cost: where the host or memory bounds it, 16 tokens take as long as 256. From
time per token alone, small chunks would look expensive and stay small. So a smaller chunk that was
no slower in total but more expensive per token is not learnt from, and a chunk that left much of
its time unused is followed by a larger one regardless of its time per token. A smaller chunk that
was cheaper per token shows that the device has become faster.
"""

import dataclasses
import math

_WEIGHT = 0.5
_WEIGHT_WORSE = 0.8
"""Weight of a slower measurement: slower prefill, as after a longer prefix, counts almost fully."""
_OUTLIER = 4.0
"""A step this many times slower than known must happen twice before it counts, since a kernel that
is compiled at its first use takes seconds once."""
_SLACK = 0.8
_GROWTH = 1.5
"""A chunk that took at most this part of its time is followed by one this many times as large."""
_FIRST_CHUNK_TOKENS = 128
_CHUNK_TOKENS_MIN = 16
_POSITION_STEP = 256
_DEPTH_FACTOR = 1.25
"""Assumed cost ratio of a token at twice the depth, until that was measured."""
_STALL_SHARE = 0.9
"""Part of the allowed stall that is planned for; a chunk may exceed its size by a scrap."""
_CHUNK_WITHOUT_DECODES_MS = 1_000.0
"""Longest chunk while no sequence decodes, so that aborts and arrivals are handled soon."""

_JOINT_PREFILL_MS = 500.0
"""Longest step of several prompts while no sequence decodes: the first waits for the last."""


@dataclasses.dataclass(slots=True)
class _ChunkCost:
    """Cost of prefill chunks at one depth."""

    tokens: int
    """Size of the last chunk that was learnt from."""
    chunk_ms: float
    """Time of that chunk."""
    token_ms: float
    """Average time per token."""
    had_outlier: bool = False
    """The last chunk was an outlier."""

    def record(self, tokens: int, chunk_ms: float) -> None:
        """Record the time of one chunk."""
        token_ms = chunk_ms / tokens
        is_expensive = token_ms >= self.token_ms
        if tokens < self.tokens and chunk_ms <= self.chunk_ms and is_expensive:
            self.had_outlier = False
            return
        if token_ms > _OUTLIER * self.token_ms and not self.had_outlier:
            self.had_outlier = True
            return
        weight = _WEIGHT_WORSE if token_ms > self.token_ms else _WEIGHT
        self.token_ms = _average(self.token_ms, token_ms, 1.0 if self.had_outlier else weight)
        self.tokens, self.chunk_ms = tokens, chunk_ms
        self.had_outlier = False

    def affordable_tokens(self, budget_ms: float, cost_factor: float) -> int:
        """Return the tokens that fit a time, each `cost_factor` times as expensive as measured."""
        tokens = int(budget_ms / max(self.token_ms * cost_factor, 1e-6))
        if cost_factor <= 1.0 and self.chunk_ms <= _SLACK * budget_ms:
            tokens = max(tokens, int(_GROWTH * self.tokens))
        return tokens


class StepTiming:
    """Measures durations of steps, and derives prefill chunk sizes and expected durations.

    They are those of one epoch, because another world has other durations.
    """

    def __init__(self, decode_stall_ms: float) -> None:
        self._decode_stall_ms = decode_stall_ms
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Forget all measurements, because another world has other durations."""
        self._decode_ms: dict[int, float] = {}
        self._chunks: dict[int, _ChunkCost] = {}
        """By depth in powers of two, because attention makes deep tokens cost more."""
        self._largest_chunk = 0

    def assume_prefill(self, tokens: int, milliseconds: float) -> None:
        """Begin with a time that the ranks have measured before the first step.

        Args:
            tokens: length of the prompt; 0: none was measured.
            milliseconds: the time of its prefill.
        """
        if tokens:
            self.record_step(tokens, 0, milliseconds)

    def prefill_token_ms(self, position: int = 0) -> float:
        """Return the milliseconds per prefill token at a position of a prompt; 0: unknown.

        Args:
            position: tokens of the prompt before it; attention makes later tokens cost more.
        """
        if not self._chunks:
            return 0.0
        cost, factor = self._nearest(position)
        return cost.token_ms * factor

    def decode_ms(self, rows: int) -> float:
        """Return the expected milliseconds of a decode of `rows` rows; 0: unknown."""
        if rows == 0 or not self._decode_ms:
            return 0.0
        if (measured_ms := self._decode_ms.get(rows)) is not None:
            return measured_ms
        below = (count for count in self._decode_ms if count <= rows)
        nearest = max(below, default=min(self._decode_ms))
        # The cost of rows lies between constant (a GPU) and proportional to their number.
        return self._decode_ms[nearest] * (1.0 if nearest > rows else max(1.0, rows / nearest))

    def chunk_tokens(self, *, decoding: bool, position: int = 0) -> int:
        """Return how many tokens the next step may prefill.

        With decodes, the step must not take longer than the setting `decode_stall_ms`; without any
        it may take a second. It has at most twice as many tokens as the largest measured chunk.

        Args:
            decoding: the step has decodes, which wait for it to end.
            position: position of the first token in its prompt.
        """
        if not self._chunks:
            return _FIRST_CHUNK_TOKENS
        budget_ms = _STALL_SHARE * self._decode_stall_ms
        if not decoding:
            budget_ms = max(budget_ms, _CHUNK_WITHOUT_DECODES_MS)
        cost, factor = self._nearest(position)
        tokens = min(cost.affordable_tokens(budget_ms, factor), 2 * self._largest_chunk)
        return max(_CHUNK_TOKENS_MIN, tokens)

    def joint_tokens_max(self, position: int = 0) -> float:
        """Return the most tokens of prefill if a step without decodes has more than one prompt.

        The first prompt's token waits for the last prompt, so this is less than for a single
        prompt. It is infinite until a prefill was measured.

        Args:
            position: position of the step's first token in its prompt.
        """
        token_ms = self.prefill_token_ms(position)
        return _JOINT_PREFILL_MS / token_ms if token_ms else math.inf

    def predicted_ms(self, chunk_tokens: int, decodes: int, position: int = 0) -> float | None:
        """Return the expected milliseconds of a step; None: too little was measured.

        Args:
            chunk_tokens: tokens of its prefill chunks.
            decodes: rows that decode.
            position: mean position of its chunks in their prompts, in tokens.
        """
        if chunk_tokens and not self._chunks:
            return None
        if decodes and not self._decode_ms:
            return None
        prefill_ms = chunk_tokens * self.prefill_token_ms(position) if chunk_tokens else 0.0
        return prefill_ms + self.decode_ms(decodes)

    def record_step(
        self, chunk_tokens: int, decodes: int, busy_ms: float, position: int = 0
    ) -> None:
        """Record the duration of a finished step.

        Args:
            chunk_tokens: tokens of its prefill chunks.
            decodes: rows that decoded.
            busy_ms: milliseconds in which the device computed.
            position: mean position of its chunks in their prompts, in tokens.
        """
        if not chunk_tokens:
            if decodes:
                old = self._decode_ms.get(decodes)
                self._decode_ms[decodes] = _average(old, busy_ms)
            return
        prefill_ms = max(busy_ms - self._decode_ms_min(decodes), 0.1 * busy_ms)
        depth = _depth(position)
        if depth in self._chunks:
            self._chunks[depth].record(chunk_tokens, prefill_ms)
        else:
            self._chunks[depth] = _ChunkCost(chunk_tokens, prefill_ms, prefill_ms / chunk_tokens)
        self._largest_chunk = max(self._largest_chunk, chunk_tokens)

    def _nearest(self, position: int) -> tuple[_ChunkCost, float]:
        """Return the cost at the nearest measured depth, and the factor for this position."""
        depth = _depth(position)
        known = max((one for one in self._chunks if one <= depth), default=min(self._chunks))
        return self._chunks[known], float(_DEPTH_FACTOR ** max(0, depth - known))

    def _decode_ms_min(self, rows: int) -> float:
        """Return a lower bound of the time of a decode of `rows` rows.

        The rest of a mixed step counts as prefill, so that chunks are too small rather than too
        large.
        """
        below = [count for count in self._decode_ms if count <= rows]
        return self._decode_ms[max(below)] if below else 0.0


def _depth(position: int) -> int:
    return (position // _POSITION_STEP).bit_length()


def _average(old: float | None, new: float, weight: float = _WEIGHT) -> float:
    return new if old is None else old + weight * (new - old)
