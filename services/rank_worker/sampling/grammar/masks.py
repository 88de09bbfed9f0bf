"""Masks of the tokens that grammars allow in one step, and their form on the device.

Shapes: R rows of logits (a sequence with k drafts has k + 1), V token ids in the vocabulary, W
words of 32 bits per row, enough for V.
"""

import dataclasses
import functools
import struct
from collections import defaultdict
from collections.abc import Sequence

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
    prepared: mx.array
    """What the device gets of the masks: on a CPU the result of `exclusion_bits_of_host`, else
    uint8 [R, 4 W], a set bit for each token that a draw may not be."""
    is_on_host: bool
    """Whether `prepared` was computed for a CPU."""

    @property
    def exclusions(self) -> mx.array:
        """Addends to the logits, [R, V]: minus infinity where a draw may not be a token, else 0."""
        # Built by the thread that builds the sampling: MLX has streams of its own in each thread.
        if self.is_on_host:
            return self.prepared.view(self.dtype)
        return exclusions_of_device(self.prepared, self.vocab_size, self.dtype)

    def digest(self) -> bytes:
        """Return 16 bytes that depend on all masks and failures, for the step's receipt."""
        found = xxhash.xxh3_128(np.ascontiguousarray(self.bits).data)
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
        self._spread: np.ndarray | None = None
        """For steps whose masks have the same shape, on a CPU."""
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
        barred: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for one in sequences:
            if one.matcher is not None:
                one.matcher.prepare()
                allowed = one.matcher.constrained_drafts(one.drafts)
                if allowed is not None:
                    begin, ids = allowed
                    if begin:
                        barred[one.matcher.barred_ids] += range(row_count, row_count + begin)
                    if begin <= len(one.drafts):
                        filled.append(_FilledRows(one.matcher, row_count + begin, ids))
            row_count += len(one.drafts) + 1
        tokens = filled[0].matcher.grammar.mask_tokens if filled else self._vocab_size
        bits = llguidance.numpy.allocate_token_bitmask(row_count, tokens)
        self._fill_rows(bits, filled)
        bits = self._widen(bits, filled)
        for barred_ids, rows in barred.items():
            for token in barred_ids:
                _set_bit(bits, rows, token, 0)
        _allow_ends(bits, filled)
        for part in filled:
            part.check(bits[part.first : part.stop])
        failures = [
            GrammarFailure(sequence_id=one.sequence_id, detail=one.matcher.error[:4_000])
            for one in sequences
            if one.matcher is not None and one.matcher.error
        ]
        on_host = mx.default_device() == mx.cpu
        forbidden = ~bits.view(np.uint8)
        prepared = self._spread_on_host(forbidden, dtype) if on_host else mx.array(forbidden)
        return StepMasks(bits, failures, self._vocab_size, dtype, prepared, on_host)

    def _spread_on_host(self, forbidden: np.ndarray, dtype: mx.Dtype) -> mx.array:
        if self._spread is None or self._spread.shape[:2] != forbidden.shape:
            self._spread = new_spread(forbidden, dtype)
        return exclusion_bits_of_host(forbidden, self._vocab_size, dtype, self._spread)

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
        for one in filled:
            more[one.first : one.stop] = 0
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

    @property
    def stop(self) -> int:
        """Index after the last of them."""
        return self.first + len(self.drafts) + 1

    def check(self, rows: np.ndarray) -> None:
        """Note an error of the matcher, whose rows then have no mask.

        Args:
            rows: int32 [drafts + 1, W], whose bits may be set.
        """
        if self.matcher.check() and not rows.any(axis=1).all():
            self.matcher.error = f"The grammar cannot be matched any further: {NO_TOKEN_LEFT}"
        if self.matcher.error:
            rows[:] = -1


def _allow_ends(bits: np.ndarray, filled: Sequence[_FilledRows]) -> None:
    """Allow each sequence's own end ids where its grammar accepts, and forget the text's end.

    Sequences with the same end ids are changed together: a choice of NumPy takes 10 us for any
    number of rows.
    """
    groups: defaultdict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for one in filled:
        key = one.matcher.grammar.text_end, one.matcher.end_ids
        groups[key] += range(one.first, one.stop)
    for (text_end, end_ids), rows in groups.items():
        accepts = (bits[rows, text_end // 32] >> (text_end % 32)) & 1
        _set_bit(bits, rows, text_end, 0)
        for token in end_ids:
            _set_bit(bits, rows, token, accepts)


def _set_bit(bits: np.ndarray, rows: Sequence[int], token: int, values: np.ndarray | int) -> None:
    """Set the bit of a token in some rows of masks, int32 [R, W], to 0 or 1, if masks have it."""
    word, bit = token // 32, np.uint32(1 << (token % 32))
    if word < bits.shape[1]:
        words = bits.view(np.uint32)
        old = words[rows, word]
        words[rows, word] = np.where(np.asarray(values) != 0, old | bit, old & ~bit)


def exclusion_bits_of_host(
    forbidden: np.ndarray, vocab_size: int, dtype: mx.Dtype, spread: np.ndarray | None = None
) -> mx.array:
    """Return the bits of exclusions, computed beside a forward on the CPU.

    NumPy looks up 32 rows of 150,000 tokens in 1.4 ms; MLX takes longer on a CPU.

    Args:
        forbidden: uint8 [R, 4 W], a set bit for each token that a draw may not be.
        vocab_size: V.
        dtype: that of the logits, any float type.
        spread: an array that `new_spread` made for these masks, which is written; None: a new one,
            whose memory the system clears first.

    Returns:
        [R, V] of the unsigned type as wide as `dtype`.
    """
    found = new_spread(forbidden, dtype) if spread is None else spread
    # The mode lets NumPy write the result without a copy; no byte is out of bounds.
    np.take(_exclusion_bits_of_bytes(dtype), forbidden, axis=0, out=found, mode="clip")
    return mx.array(found.reshape(len(forbidden), -1)[:, :vocab_size])


def new_spread(forbidden: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Return an empty array for `exclusion_bits_of_host`, unsigned [R, 4 W, 8].

    Args:
        forbidden: uint8 [R, 4 W].
        dtype: that of the logits.
    """
    return np.empty((*forbidden.shape, 8), _exclusion_bits_of_bytes(dtype).dtype)


def exclusions_of_device(forbidden: mx.array, vocab_size: int, dtype: mx.Dtype) -> mx.array:
    """Return exclusions, computed by the device: each byte of a mask stands for eight of them.

    Args:
        forbidden: uint8 [R, 4 W], a set bit for each token that a draw may not be.
        vocab_size: V.
        dtype: that of the logits, any float type.

    Returns:
        [R, V] of `dtype`, minus infinity or 0.
    """
    spread = _exclusions_of_bytes(dtype)[forbidden]
    return spread.reshape(forbidden.shape[0], -1)[:, :vocab_size]


@functools.cache
def _exclusions_of_bytes(dtype: mx.Dtype) -> mx.array:
    """Return the exclusions of each byte, the lowest bit first, [256, 8] of a float type."""
    numbers = np.arange(256, dtype=np.uint8)[:, None]
    is_set = np.unpackbits(numbers, axis=1, bitorder="little") != 0
    return mx.array(np.where(is_set, -np.inf, 0.0).astype(np.float32)).astype(dtype)


@functools.cache
def _exclusion_bits_of_bytes(dtype: mx.Dtype) -> np.ndarray:
    """Return the same as unsigned integers, for NumPy, which does not have all float types."""
    same_width = mx.uint32 if dtype.size == 4 else mx.uint16
    return np.array(_exclusions_of_bytes(dtype).view(same_width))
