"""Log probabilities of the model's own distribution, before bias, penalties and temperature.

Shapes: R rows of logits, S of them that ask for log probabilities, V token ids.
"""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from services.rank_worker.sampling.row_settings import RowSelection, RowSettings
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


def pending_logprobs(
    logits: mx.array, tokens: mx.array, settings: Sequence[RowSettings]
) -> PendingLogprobs | None:
    """Build the log probabilities of the rows that ask for them.

    Args:
        logits: float32 [R, V], raw.
        tokens: int32 [R], sampled.
        settings: of each row.

    Returns:
        Natural logarithms of the softmax of the raw logits, not computed yet; None if no row asks
        for any.
    """
    rows = RowSelection.where([row.alternatives is not None for row in settings])
    if not len(rows):
        return None
    alternatives = [settings[index].alternatives or 0 for index in rows.indices]
    logprobs = rows.take(logits)
    logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, rows.take(tokens)[:, None], axis=-1)[:, 0]
    most = min(max(alternatives), logits.shape[-1])
    if most:
        ids = mx.argpartition(-logprobs, kth=most - 1, axis=-1)[:, :most].astype(mx.int32)
    else:
        ids = mx.zeros((len(rows), 0), dtype=mx.int32)
    return PendingLogprobs(
        rows=rows,
        alternatives=alternatives,
        chosen=chosen,
        top_ids=ids,
        top_values=mx.take_along_axis(logprobs, ids, axis=-1),
    )


def _finite(value: float) -> float:
    # The log probability of an impossible token is -inf; messages carry finite numbers only.
    return max(value, -1e30)
