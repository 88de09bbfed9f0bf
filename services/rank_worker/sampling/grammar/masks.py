"""Masks of the tokens that grammars allow in one step, and their form on the device.

Shapes: R rows of logits (a sequence with k drafts has k + 1), V token ids in the vocabulary, W
words of 32 bits per row, enough for V.
"""

import dataclasses
import functools
import struct
from collections.abc import Sequence
from typing import Any

import llguidance.numpy
import mlx.core as mx
import numpy as np
import xxhash
from llguidance import LLExecutor, LLMatcher

from services.rank_worker.sampling.grammar.matcher import NO_TOKEN_LEFT, Matcher
from shared.messages import GrammarFailure
from shared.os.cpu_cores import available_cores

_THREADS_MAX = 8
"""Threads that fill masks; a row takes 0.02 to 1.5 ms."""


@dataclasses.dataclass(frozen=True, slots=True)
class MaskedSequence:
    """A sequence that draws in a step: its matcher, if it has a grammar, and its drafts."""

    sequence_id: int
    matcher: Matcher | None
    drafts: Sequence[int]
    """Token ids that the step verifies; [] without drafts, and for a sequence without a grammar
    their number alone counts."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepMasks:
    """Masks of one step, filled on the host."""

    bits: np.ndarray
    """int32 [R, W]: bit t of a row is set if its draw may be token t; all are in rows without a
    grammar."""
    failures: list[GrammarFailure]
    """Sequences of the step whose grammars have failed, whose rows have no mask."""
    vocab_size: int
    """V."""
    dtype: mx.Dtype
    """That of the logits."""
    host_exclusions: mx.array | None = None
    """What `exclusion_bits_of_host` returned; None: the device spreads the masks."""

    @property
    def exclusions(self) -> mx.array:
        """Addends to the logits, [R, V]: minus infinity where a draw may not be a token, else 0."""
        # Built by the thread that builds the sampling: MLX has streams of its own in each thread.
        found = self.host_exclusions
        if found is None:
            found = exclusion_bits_of_device(self.bits, self.vocab_size, self.dtype)
        return found.view(self.dtype)

    def digest(self) -> bytes:
        """Return 16 bytes that depend on all masks and failures, for the step's receipt."""
        found = xxhash.xxh3_128(self.bits.tobytes())
        failed = [one.sequence_id for one in self.failures]
        found.update(struct.pack(f"<{len(failed)}Q", *failed))
        return found.digest()


class MaskFiller:
    """Fills the masks of each step, several rows at once in threads of the library."""

    def __init__(self, vocab_size: int) -> None:
        """Start the threads.

        Args:
            vocab_size: V.
        """
        self._vocab_size = vocab_size
        self._threads = LLExecutor(max(1, min(_THREADS_MAX, available_cores())))

    def fill(self, sequences: Sequence[MaskedSequence], dtype: mx.Dtype = mx.float32) -> StepMasks:
        """Fill the masks of a step. Waits for grammars that are still being compiled.

        Args:
            sequences: all that draw, in the order of their rows.
            dtype: that of the logits, any float type.

        Raises:
            InvariantBroken: tokens of an earlier step are not known to a matcher.
        """
        row_count = 0
        filled: list[_FilledRows] = []
        barred: list[tuple[slice, Matcher]] = []
        for one in sequences:
            if one.matcher is not None:
                one.matcher.prepare()
                allowed = one.matcher.constrained_drafts(one.drafts)
                if allowed is not None:
                    begin, ids = allowed
                    barred.append((slice(row_count, row_count + begin), one.matcher))
                    if begin <= len(one.drafts):
                        filled.append(_FilledRows(one.matcher, row_count + begin, ids))
            row_count += len(one.drafts) + 1
        tokens = filled[0].matcher.grammar.mask_tokens if filled else self._vocab_size
        bits = llguidance.numpy.allocate_token_bitmask(row_count, tokens)
        self._fill_rows(bits, filled)
        bits = self._widen(bits, filled)
        for place, matcher in barred:
            for token in matcher.barred_ids:
                _set_bit(bits[place], token, 0)
        for rows in filled:
            rows.finish(bits[rows.first : rows.first + len(rows.drafts) + 1])
        failures = [
            GrammarFailure(sequence_id=one.sequence_id, detail=one.matcher.error[:4_000])
            for one in sequences
            if one.matcher is not None and one.matcher.error
        ]
        on_host = mx.default_device() == mx.cpu
        exclusions = exclusion_bits_of_host(bits, self._vocab_size, dtype) if on_host else None
        return StepMasks(bits, failures, self._vocab_size, dtype, exclusions)

    def _fill_rows(self, bits: np.ndarray, filled: Sequence["_FilledRows"]) -> None:
        plain = [(one.state, one.first) for one in filled if not one.drafts]
        drafted = [(one.state, one.first, one.drafts) for one in filled if one.drafts]
        if plain:
            llguidance.numpy.fill_next_token_bitmask_par(self._threads, plain, bits)
        if drafted:
            llguidance.numpy.fill_next_token_bitmask_par_with_draft_tokens(
                self._threads, drafted, bits
            )

    def _widen(self, bits: np.ndarray, filled: Sequence["_FilledRows"]) -> np.ndarray:
        """Add words for ids that only the model has, which no grammar allows."""
        missing = -(-self._vocab_size // 32) - bits.shape[1]
        if missing <= 0:
            return bits
        more = np.full((bits.shape[0], missing), -1, dtype=np.int32)
        for rows in filled:
            more[rows.first : rows.first + len(rows.drafts) + 1] = 0
        return np.concatenate([bits, more], axis=1)


@dataclasses.dataclass(frozen=True, slots=True)
class _FilledRows:
    """Adjacent rows that one matcher fills: of the draws after each of its drafts."""

    matcher: Matcher
    first: int
    """Index of the first of these rows."""
    drafts: list[int]
    """Drafts that the grammar allows."""

    @property
    def state(self) -> LLMatcher:
        """The library's matcher."""
        return self.matcher.grammar.state

    def finish(self, rows: np.ndarray) -> None:
        """Allow the sequence's own end ids where the grammar accepts; note an error.

        Args:
            rows: int32 [drafts + 1, W], as the library has filled them.
        """
        text_end = self.matcher.grammar.text_end
        accepts = (rows[:, text_end // 32] >> (text_end % 32)) & 1
        _set_bit(rows, text_end, 0)
        for token in self.matcher.end_ids:
            _set_bit(rows, token, accepts)
        if self.matcher.check() and not rows.any(axis=1).all():
            self.matcher.error = f"The grammar cannot be matched any further: {NO_TOKEN_LEFT}"
        if self.matcher.error:
            rows[:] = -1


def _set_bit(rows: np.ndarray, token: int, values: np.ndarray | int) -> None:
    """Set the bit of a token in each row, int32 [rows, W], to 0 or 1, if the rows have it."""
    if token // 32 >= rows.shape[1]:
        return
    bit = np.uint32(1 << (token % 32))
    words = rows.view(np.uint32)[:, token // 32]
    words[:] = np.where(np.asarray(values) != 0, words | bit, words & ~bit)


_MINUS_INFINITY: dict[mx.Dtype, tuple[mx.Dtype, type[np.unsignedinteger[Any]], int]] = {
    mx.float32: (mx.uint32, np.uint32, 0xFF80_0000),
    mx.bfloat16: (mx.uint16, np.uint16, 0xFF80),
    mx.float16: (mx.uint16, np.uint16, 0xFC00),
}
"""The unsigned types as wide as a float type, and the bits of minus infinity; 0 has no bit set."""


def exclusion_bits_of_host(bits: np.ndarray, vocab_size: int, dtype: mx.Dtype) -> mx.array:
    """Return the bits of the exclusions of masks, computed beside a forward on the CPU.

    NumPy's vector code is faster than MLX there, and a product takes a fifth of a choice's time.

    Args:
        bits: masks, int32 [R, W].
        vocab_size: V.
        dtype: that of the logits, any float type.

    Returns:
        [R, V] of the unsigned type as wide as `dtype`.
    """
    _, host_type, minus_infinity = _MINUS_INFINITY[dtype]
    forbidden = ~bits.view(np.uint8)
    unpacked = np.unpackbits(forbidden, axis=1, count=vocab_size, bitorder="little")
    return mx.array(np.multiply(unpacked, host_type(minus_infinity), dtype=host_type))


def exclusion_bits_of_device(bits: np.ndarray, vocab_size: int, dtype: mx.Dtype) -> mx.array:
    """Return the same as `exclusion_bits_of_host`, computed by the device from the masks."""
    device_type, _, minus_infinity = _MINUS_INFINITY[dtype]
    forbidden = mx.array(~bits.view(np.uint8))
    spread = _bits_of_bytes()[forbidden].reshape(bits.shape[0], -1)[:, :vocab_size]
    return spread.astype(device_type) * mx.array(minus_infinity, device_type)


@functools.cache
def _bits_of_bytes() -> mx.array:
    """Return the bits of each byte, the lowest first, uint8 [256, 8]."""
    numbers = np.arange(256, dtype=np.uint8)[:, None]
    return mx.array(np.unpackbits(numbers, axis=1, bitorder="little"))
