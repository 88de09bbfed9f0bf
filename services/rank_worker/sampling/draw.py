"""Temperature, cut-offs and the draw itself."""

from collections.abc import Sequence

import mlx.core as mx

from services.rank_worker.sampling import keys
from services.rank_worker.sampling.rows import Chosen
from services.rank_worker.sampling.settings import RowSettings


def draw(logits: mx.array, rows: Sequence[RowSettings], positions: Sequence[int]) -> mx.array:
    """Draw one token per row by the Gumbel-max trick: the highest of logit / temperature + noise.

    Args:
        logits: float32 [rows, vocab], bias and penalties applied.
        rows: settings, all with a temperature.
        positions: each row's position of the new token in the whole sequence.

    Returns:
        int32 [rows].
    """
    temperatures = mx.array([row.sampling.temperature for row in rows], dtype=mx.float32)
    # The highest becomes 0, so that no temperature overflows.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperatures[:, None]
    noise = gumbel_noise(
        [keys.key(row.key_state, position) for row, position in zip(rows, positions, strict=True)],
        logits.shape[-1],
    )
    cut = Chosen([index for index, row in enumerate(rows) if row.is_cut], len(rows))
    if len(cut) == len(rows):
        return _draw_cut(scaled, noise, rows)
    tokens = mx.argmax(scaled + noise, axis=-1).astype(mx.int32)
    if len(cut):
        cut_rows = [rows[index] for index in cut.indices]
        tokens = cut.put(tokens, _draw_cut(cut.take(scaled), cut.take(noise), cut_rows))
    return tokens


def gumbel_noise(row_keys: Sequence[tuple[int, int]], vocab_size: int) -> mx.array:
    """Return float32 [rows, vocab]; each row depends on its own key alone, bit by bit."""

    def one_row(key: mx.array) -> mx.array:
        return mx.random.gumbel((vocab_size,), key=key)

    noise: mx.array = mx.vmap(one_row)(mx.array([list(one) for one in row_keys], dtype=mx.uint32))
    return noise


def kept_in_order(scaled: mx.array, rows: Sequence[RowSettings]) -> tuple[mx.array, mx.array]:
    """Apply top_k, then top_p to what is left of the distribution, then min_p.

    Args:
        scaled: float32 [rows, vocab], logits over temperature.
        rows: settings.

    Returns:
        (order, kept): token ids likeliest first, and bool in that order; the first is kept.
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
    shares = mx.softmax(mx.where(kept, values, -mx.inf), axis=-1, precise=True)
    # What is likelier than this token, itself not counted: the token that crosses top_p stays.
    before = mx.cumsum(shares, axis=-1, inclusive=False)
    # The sum of all shares may miss 1 by a rounding error, which must not cut anything.
    kept = kept & ((before < top_p) | (top_p >= 1.0))
    kept = kept & (shares >= min_p * shares[:, :1])
    return order, kept | (ranks == 0)


def _draw_cut(scaled: mx.array, noise: mx.array, rows: Sequence[RowSettings]) -> mx.array:
    order, kept = kept_in_order(scaled, rows)
    # The noise stays with its token: cutting does not change which of the kept tokens wins.
    score = mx.take_along_axis(scaled + noise, order, axis=-1)
    winner = mx.argmax(mx.where(kept, score, -mx.inf), axis=-1)
    return mx.take_along_axis(order, winner[:, None], axis=-1)[:, 0].astype(mx.int32)
