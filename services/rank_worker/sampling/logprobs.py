"""Log probabilities of the model's own distribution, before bias, penalties and temperature.

Shapes: R rows of logits, S of them that ask for log probabilities, V token ids, P of them
in a rank's part, N ranks.
"""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from services.rank_worker.sampling.row_settings import RowSelection, RowSettings
from services.rank_worker.sampling.vocabulary import VocabularyPart
from shared.messages import TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log probabilities of the S rows that ask for them; the arrays may not be computed yet."""

    rows: RowSelection
    """The S rows, out of R."""
    alternatives: Sequence[int]
    """Number of likeliest tokens to return for each selected row."""
    chosen: mx.array
    """float32 [S], of the sampled tokens."""
    top_ids: mx.array
    """int32 [S, n], the n likeliest tokens of each row in any order; n is the most that any row
    asks for."""
    top_values: mx.array
    """float32 [S, n], their log probabilities."""

    def arrays(self) -> list[mx.array]:
        """Return the lazy arrays: of the sampled tokens, ids and values of the likeliest."""
        return [self.chosen, self.top_ids, self.top_values]

    def read(self, total: int) -> list[list[TokenLogprobs]]:
        """Wait for the log probabilities and return them by row.

        Args:
            total: R, the number of rows of logits.

        Returns:
            One list per row: empty, or with one entry where the row asks for log probabilities. An
            entry lists the likeliest tokens first.
        """
        results: list[list[TokenLogprobs]] = [[] for _ in range(total)]
        chosen = np.array(self.chosen)
        ids, values = np.array(self.top_ids), np.array(self.top_values)
        # Ties are ordered by token id, so that the order does not depend on the device's sort.
        order = np.lexsort((ids, -values), axis=-1)
        ids = np.take_along_axis(ids, order, axis=-1)
        values = np.take_along_axis(values, order, axis=-1)
        for row, index in enumerate(self.rows.indices):
            count = self.alternatives[row]
            results[index] = [
                TokenLogprobs(
                    logprob=_finite(float(chosen[row])),
                    top_ids=ids[row, :count].tolist(),
                    top_logprobs=[_finite(value) for value in values[row, :count].tolist()],
                )
            ]
        return results


def logprobs_of_part(
    logits: mx.array, settings: Sequence[RowSettings], vocabulary: VocabularyPart
) -> list[mx.array]:
    """Return what the ranks exchange of their parts for log probabilities.

    Args:
        logits: float32 [R, P], raw.
        settings: of each row.
        vocabulary: whose part the logits are.

    Returns:
        Log-sum-exp of the part, float32 [S]; ids and raw logits of its n likeliest tokens, int32
        and float32 [S, n]. [] if no row asks for log probabilities.
    """
    rows = _asking(settings)
    if not len(rows):
        return []
    logits = rows.take(logits)
    total = mx.logsumexp(logits, axis=-1)
    most = _most(rows, settings, vocabulary.size)
    if not most:
        none = mx.zeros((len(rows), 0))
        return [total, none.astype(mx.int32), none]
    missing = most - logits.shape[-1]
    if missing > 0:
        logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
    columns = mx.argpartition(-logits, kth=most - 1, axis=-1)[:, :most]
    top = mx.take_along_axis(logits, columns, axis=-1)
    return [total, columns.astype(mx.int32) + vocabulary.start, top]


def pending_logprobs(
    chosen: mx.array, parts: Sequence[mx.array], settings: Sequence[RowSettings]
) -> PendingLogprobs | None:
    """Build the log probabilities of the rows that ask for them.

    Args:
        chosen: float32 [R], raw logits of the sampled tokens.
        parts: the results of `logprobs_of_part` on all ranks, [N, S] and [N, S, n]; [] if no row
            asks for any.
        settings: of each row.

    Returns:
        Natural logarithms of the softmax of the raw logits, not computed yet; None if no row asks
        for any.
    """
    if not parts:
        return None
    rows = _asking(settings)
    totals, ids, values = parts
    total = mx.logsumexp(totals, axis=0)
    most = ids.shape[-1]
    ids, values = (one.transpose(1, 0, 2).flatten(1) for one in (ids, values))
    if most and values.shape[-1] > most:
        best = mx.argpartition(-values, kth=most - 1, axis=-1)[:, :most]
        ids, values = (mx.take_along_axis(one, best, axis=-1) for one in (ids, values))
    return PendingLogprobs(
        rows=rows,
        alternatives=[settings[index].alternatives or 0 for index in rows.indices],
        chosen=rows.take(chosen) - total,
        top_ids=ids,
        top_values=values - total[:, None],
    )


def _asking(settings: Sequence[RowSettings]) -> RowSelection:
    """Return the S rows that ask for log probabilities."""
    return RowSelection.where([row.alternatives is not None for row in settings])


def _most(rows: RowSelection, settings: Sequence[RowSettings], vocab_size: int) -> int:
    """Return n, the largest number of likeliest tokens that a row asks for."""
    return min(max(settings[index].alternatives or 0 for index in rows.indices), vocab_size)


def _finite(value: float) -> float:
    # The log probability of an impossible token is -inf; messages carry finite numbers only.
    return max(value, -1e30)
