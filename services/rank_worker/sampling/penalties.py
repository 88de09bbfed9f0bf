"""Logit bias and penalties, and the token counts that penalties need.

Shapes: R rows of logits, V token ids in the vocabulary.
"""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from services.rank_worker.sampling.row_settings import RowSettings
from services.rank_worker.sampling.vocabulary import VocabularyPart

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def add_bias(logits: mx.array, rows: Sequence[RowSettings], vocabulary: VocabularyPart) -> mx.array:
    """Return logits, float32 [R, P], with the bias of each row added.

    Args:
        logits: float32 [R, P].
        rows: settings of each row, at least one of them with a bias.
        vocabulary: whose part, of P token ids, the logits are.
    """
    biases = [
        (index, token - vocabulary.start, addend)
        for index, settings in enumerate(rows)
        for token, addend in settings.bias
        if vocabulary.start <= token < vocabulary.stop
    ]
    if not biases:
        return logits
    row_index, columns, addends = zip(*biases, strict=True)
    where = mx.array(row_index, dtype=mx.int32), mx.array(columns, dtype=mx.int32)
    return logits.at[where].add(mx.array(addends, dtype=mx.float32))


def penalize(
    logits: mx.array, rows: Sequence[RowSettings], counts: mx.array, seen: mx.array
) -> mx.array:
    """Apply repetition, frequency and presence penalties as vLLM defines them.

    Source of the repetition penalty: Keskar et al., "CTRL" (2019).

    Args:
        logits: float32 [R, V].
        rows: settings of each row.
        counts: int32 [R, V], how often the completion holds each token.
        seen: bool [R, V], whether the prompt holds each token.

    Returns:
        float32 [R, V], finite.
    """
    settings = [row.sampling for row in rows]
    repetition = _column([one.repetition_penalty for one in settings])
    frequency = _column([one.frequency_penalty for one in settings])
    presence = _column([one.presence_penalty for one in settings])
    in_completion = counts > 0
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(seen | in_completion, repeated, logits)
    logits = logits - frequency * counts - presence * in_completion
    return mx.clip(logits, -_FLOAT32_MAX, _FLOAT32_MAX)


@dataclasses.dataclass(frozen=True, slots=True)
class UncountedTokens:
    """Unverified drafts that penalties of later positions count, although `TokenCounts` does not.

    Drafts may be rejected, so they are not added to the table.
    """

    rows: Sequence[int]
    """The row of each token; a row may occur several times."""
    tokens: mx.array
    """int32 [tokens]."""

    def among(self, indices: Sequence[int]) -> "UncountedTokens":
        """Return the tokens that belong to some rows of the logits.

        Args:
            indices: numbers of these rows; in the result the rows are numbered 0, 1, 2, ... in this
                order.
        """
        numbers = {row: number for number, row in enumerate(indices)}
        kept = [index for index, row in enumerate(self.rows) if row in numbers]
        return UncountedTokens(
            [numbers[self.rows[index]] for index in kept],
            self.tokens[mx.array(kept, dtype=mx.int32)],
        )


class TokenCounts:
    """How often each token occurs in the penalized sequences, on the device.

    New tokens are added on the device, so the counts are right while steps run ahead of the host.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, int] = {}
        self._free_rows: list[int] = []
        self._counts = mx.zeros((0, vocab_size), dtype=mx.int32)
        self._seen = mx.zeros((0, vocab_size), dtype=mx.bool_)

    def admit(self, sequence_id: int, prompt: np.ndarray, completion: np.ndarray) -> None:
        """Add a sequence and count its tokens.

        Args:
            sequence_id: the sequence.
            prompt: int32 [prompt tokens].
            completion: int32 [completion tokens known so far].
        """
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self._rows[sequence_id] = row
        counts = np.bincount(completion, minlength=self._vocab_size).astype(np.int32)
        seen = np.zeros(self._vocab_size, dtype=np.bool_)
        seen[prompt] = True
        self._counts[row] = mx.array(counts)
        self._seen[row] = mx.array(seen)

    def drop(self, sequence_id: int) -> None:
        """Remove a sequence, if it is counted."""
        row = self._rows.pop(sequence_id, None)
        if row is not None:
            self._free_rows.append(row)

    def read(
        self, sequence_ids: Sequence[int], uncounted: UncountedTokens | None = None
    ) -> tuple[mx.array, mx.array]:
        """Return the counts for rows of logits.

        Args:
            sequence_ids: the sequence of each row.
            uncounted: tokens to count in addition to the table.

        Returns:
            (counts, seen): int32 [R, V], how often the completion holds each token, and bool [R,
            V], whether the prompt does.
        """
        rows = self._index(sequence_ids)
        counts = self._counts[rows]
        if uncounted is not None and uncounted.rows:
            where = mx.array(list(uncounted.rows), dtype=mx.int32)
            counts = counts.at[where, uncounted.tokens].add(1)
        return counts, self._seen[rows]

    def add(self, sequence_ids: Sequence[int], tokens: mx.array) -> None:
        """Count new tokens of completions.

        Args:
            sequence_ids: the sequence of each token; a sequence may occur several times.
            tokens: int32 [tokens].
        """
        self._counts = self._counts.at[self._index(sequence_ids), tokens].add(1)

    def _index(self, sequence_ids: Sequence[int]) -> mx.array:
        return mx.array([self._rows[one] for one in sequence_ids], dtype=mx.int32)

    def _grow(self) -> None:
        old = self._counts.shape[0]
        more = max(4, old)
        self._counts = mx.pad(self._counts, [(0, more), (0, 0)])
        self._seen = mx.pad(self._seen, [(0, more), (0, 0)])
        # Rows are popped from the end, the lowest first.
        self._free_rows = list(range(old + more - 1, old - 1, -1))


def _column(values: list[float]) -> mx.array:
    """Return float32 [R, 1]."""
    return mx.array(values, dtype=mx.float32)[:, None]
