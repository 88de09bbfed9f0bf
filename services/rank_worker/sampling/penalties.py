"""Logit bias and penalties, and the token counts on the device that penalties need."""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from services.rank_worker.sampling.settings import RowSettings

_FINITE = float(np.finfo(np.float32).max)


def add_bias(logits: mx.array, rows: Sequence[RowSettings]) -> mx.array:
    """Return logits [rows, vocab] float32 with each row's bias added."""
    row_index: list[int] = []
    tokens: list[int] = []
    addends: list[float] = []
    for index, settings in enumerate(rows):
        row_index += [index] * len(settings.bias)
        tokens += [token for token, _ in settings.bias]
        addends += [addend for _, addend in settings.bias]
    where = mx.array(row_index, dtype=mx.int32), mx.array(tokens, dtype=mx.int32)
    return logits.at[where].add(mx.array(addends, dtype=mx.float32))


def penalize(
    logits: mx.array, rows: Sequence[RowSettings], counts: mx.array, seen: mx.array
) -> mx.array:
    """Apply repetition, frequency and presence penalties, as vLLM defines them.

    Args:
        logits: float32 [rows, vocab].
        rows: their settings.
        counts: int32 [rows, vocab], how often the completion holds each token.
        seen: bool [rows, vocab], whether the prompt holds it.

    Returns:
        float32 [rows, vocab], finite.
    """
    settings = [row.sampling for row in rows]
    repetition = _column([one.repetition_penalty for one in settings])
    frequency = _column([one.frequency_penalty for one in settings])
    presence = _column([one.presence_penalty for one in settings])
    in_completion = counts > 0
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(seen | in_completion, repeated, logits)
    logits = logits - frequency * counts - presence * in_completion
    return mx.clip(logits, -_FINITE, _FINITE)


@dataclasses.dataclass(frozen=True, slots=True)
class Uncounted:
    """Tokens that rows of logits count beside the table, and nobody else does: drafts."""

    rows: Sequence[int]
    """Whose each is; a row may stand there for several."""
    tokens: mx.array
    """int32 [tokens]."""

    def among(self, indices: Sequence[int]) -> "Uncounted":
        """Return those of these rows, which become rows 0, 1, 2, ..."""
        numbers = {row: number for number, row in enumerate(indices)}
        kept = [place for place, row in enumerate(self.rows) if row in numbers]
        return Uncounted(
            [numbers[self.rows[place]] for place in kept],
            self.tokens[mx.array(kept, dtype=mx.int32)],
        )


class TokenCounts:
    """What each penalized sequence's prompt and completion hold, by token id, on the device.

    One row of a table per sequence; new tokens are scattered into it, so it is right under
    run-ahead, when the host does not know them yet.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._counts = mx.zeros((0, vocab_size), dtype=mx.int32)
        self._seen = mx.zeros((0, vocab_size), dtype=mx.bool_)

    def admit(self, sequence_id: int, prompt: np.ndarray, completion: np.ndarray) -> None:
        """Count a sequence's tokens (int32 arrays)."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._rows[sequence_id] = row
        counts = np.bincount(completion, minlength=self._vocab_size).astype(np.int32)
        seen = np.zeros(self._vocab_size, dtype=np.bool_)
        seen[prompt] = True
        self._counts[row] = mx.array(counts)
        self._seen[row] = mx.array(seen)

    def drop(self, sequence_id: int) -> None:
        """Forget a sequence; one that was never counted is ignored."""
        row = self._rows.pop(sequence_id, None)
        if row is not None:
            self._free.append(row)

    def read(
        self, sequence_ids: Sequence[int], uncounted: Uncounted | None = None
    ) -> tuple[mx.array, mx.array]:
        """Return (counts, seen), [rows, vocab] each.

        Args:
            sequence_ids: whose counts each row has.
            uncounted: tokens that rows count beside them.
        """
        rows = self._index(sequence_ids)
        counts = self._counts[rows]
        if uncounted is not None and uncounted.rows:
            where = mx.array(list(uncounted.rows), dtype=mx.int32)
            counts = counts.at[where, uncounted.tokens].add(1)
        return counts, self._seen[rows]

    def add(self, sequence_ids: Sequence[int], tokens: mx.array) -> None:
        """Count new tokens, int32 [tokens]; a sequence may stand there for several."""
        self._counts = self._counts.at[self._index(sequence_ids), tokens].add(1)

    def _index(self, sequence_ids: Sequence[int]) -> mx.array:
        return mx.array([self._rows[one] for one in sequence_ids], dtype=mx.int32)

    def _grow(self) -> None:
        old = self._counts.shape[0]
        more = max(4, old)
        self._counts = mx.concatenate(
            [self._counts, mx.zeros((more, self._vocab_size), dtype=mx.int32)]
        )
        self._seen = mx.concatenate(
            [self._seen, mx.zeros((more, self._vocab_size), dtype=mx.bool_)]
        )
        # Popped from the end: the lowest row first.
        self._free = list(range(old + more - 1, old - 1, -1))


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]
