"""Random sampling of tokens with the Gumbel-max trick.

The argmax of logit / temperature + Gumbel noise is a sample of the softmax. Source: Maddison,
Tarlow, Minka, "A* Sampling" (2014). Shapes: R rows, V token ids in the vocabulary.
"""

from collections.abc import Sequence

import mlx.core as mx

from services.rank_worker.sampling import keys
from services.rank_worker.sampling.row_settings import RowSelection, RowSettings


def sample_gumbel_max(
    logits: mx.array, rows: Sequence[RowSettings], positions: Sequence[int]
) -> mx.array:
    """Sample one token per row.

    Args:
        logits: float32 [R, V], bias and penalties applied.
        rows: settings of each row, all with a temperature above 0.
        positions: number of tokens before each row's new token in its sequence, prompt included.

    Returns:
        Token ids, int32 [R].
    """
    temperatures = mx.array([row.sampling.temperature for row in rows], dtype=mx.float32)
    # The highest logit becomes 0, so that no temperature overflows.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperatures[:, None]
    noise = gumbel_noise(
        [
            keys.draw_key(row.key_state, position)
            for row, position in zip(rows, positions, strict=True)
        ],
        logits.shape[-1],
    )
    truncated = RowSelection.where([row.is_truncated for row in rows])
    if len(truncated) == len(rows):
        return _sample_truncated(scaled, noise, rows)
    tokens = mx.argmax(scaled + noise, axis=-1).astype(mx.int32)
    if len(truncated):
        truncated_rows = [rows[index] for index in truncated.indices]
        tokens = truncated.put(
            tokens, _sample_truncated(truncated.take(scaled), truncated.take(noise), truncated_rows)
        )
    return tokens


def gumbel_noise(row_keys: Sequence[tuple[int, int]], vocab_size: int) -> mx.array:
    """Return Gumbel noise, float32 [R, V]. Each row depends, bit for bit, on its own key alone.

    Args:
        row_keys: the two 32-bit words of each row's key.
        vocab_size: V.
    """

    def one_row(key: mx.array) -> mx.array:
        return mx.random.gumbel((vocab_size,), key=key)

    noise: mx.array = mx.vmap(one_row)(mx.array([list(one) for one in row_keys], dtype=mx.uint32))
    return noise


def truncate(scaled: mx.array, rows: Sequence[RowSettings]) -> tuple[mx.array, mx.array]:
    """Apply top_k, then top_p (nucleus sampling) to the renormalized rest, then min_p.

    Sources: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020), for top_p;
    Nguyen et al., "Turning Up the Heat: Min-p Sampling" (2024), for min_p.

    Args:
        scaled: float32 [R, V], logits divided by the temperature.
        rows: settings of each row.

    Returns:
        (order, kept): token ids, uint32 [R, V], the likeliest first; and bool [R, V] in that order.
        The likeliest token is always kept.
    """
    settings = [row.sampling for row in rows]
    vocab_size = scaled.shape[-1]
    top_k = mx.array([one.top_k or vocab_size for one in settings], dtype=mx.uint32)[:, None]
    top_p = mx.array([one.top_p for one in settings], dtype=mx.float32)[:, None]
    min_p = mx.array([one.min_p for one in settings], dtype=mx.float32)[:, None]
    order = mx.argsort(-scaled, axis=-1)
    values = mx.take_along_axis(scaled, order, axis=-1)
    ranks = mx.arange(vocab_size, dtype=mx.uint32)[None]
    kept = ranks < top_k
    probabilities = mx.softmax(mx.where(kept, values, -mx.inf), axis=-1, precise=True)
    # Probability of all likelier tokens. The token that crosses top_p is kept.
    likelier = mx.cumsum(probabilities, axis=-1, inclusive=False)
    # Rounding may make the sum differ from 1, which must not remove a token where top_p is 1.
    kept = kept & ((likelier < top_p) | (top_p >= 1.0))
    kept = kept & (probabilities >= min_p * probabilities[:, :1])
    return order, kept | (ranks == 0)


def _sample_truncated(scaled: mx.array, noise: mx.array, rows: Sequence[RowSettings]) -> mx.array:
    """Sample from the tokens that `truncate` keeps; float32 [R, V] twice, result int32 [R]."""
    order, kept = truncate(scaled, rows)
    # Each token keeps its noise, so truncation does not change which of the kept tokens wins.
    score = mx.take_along_axis(scaled + noise, order, axis=-1)
    winner = mx.argmax(mx.where(kept, score, -mx.inf), axis=-1)
    return mx.take_along_axis(order, winner[:, None], axis=-1)[:, 0].astype(mx.int32)
