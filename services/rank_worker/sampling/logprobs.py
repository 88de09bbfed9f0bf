"""Log probabilities of the raw distribution: before bias, penalties, temperature and cut-offs."""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from services.rank_worker.sampling.rows import Chosen
from shared.messages import TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log probabilities that are being computed."""

    rows: Chosen
    alternatives: Sequence[int]
    """Per row, how many of the likeliest tokens were asked for."""
    chosen: mx.array
    """float32 [rows], of the sampled tokens."""
    top_ids: mx.array
    """int32 [rows, n], n the most that any row asked for."""
    top_values: mx.array
    """float32 [rows, n]."""

    def arrays(self) -> list[mx.array]:
        """Return what must be evaluated."""
        return [self.chosen, self.top_ids, self.top_values]

    def read(self, total: int) -> list[list[TokenLogprobs]]:
        """Wait, and return one list per row of the batch, empty where none were asked for."""
        results: list[list[TokenLogprobs]] = [[] for _ in range(total)]
        chosen = np.array(self.chosen)
        ids, values = np.array(self.top_ids), np.array(self.top_values)
        # Likeliest first; equal ones by id, so that the order never depends on a device's sort.
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
    logits: mx.array, rows: Chosen, tokens: mx.array, alternatives: Sequence[int]
) -> PendingLogprobs:
    """Build the log probabilities of some rows.

    Args:
        logits: float32 [batch, vocab], raw.
        rows: rows that asked for them.
        tokens: int32 [batch], sampled ids.
        alternatives: per asking row, how many of the likeliest tokens it wants.
    """
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
    # A token that the model rules out; messages carry finite numbers only.
    return max(value, -1e30)
