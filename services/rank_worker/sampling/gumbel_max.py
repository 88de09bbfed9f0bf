"""Random sampling of tokens with the Gumbel-max trick.

The argmax of logit / temperature + Gumbel noise is a sample of the softmax. Source: Maddison,
Tarlow, Minka, "A* Sampling" (2014). The noise of a token depends on the row's key and the token id
alone, so each part of a vocabulary can be scored by itself.

Shapes: R rows, V token ids in the vocabulary, P of them in the part whose logits are given.
"""

from collections.abc import Sequence

import mlx.core as mx

from services.rank_worker.sampling import keys
from services.rank_worker.sampling.row_settings import RowSettings
from services.rank_worker.sampling.vocabulary import VocabularyPart


def score(
    logits: mx.array,
    highest: mx.array,
    rows: Sequence[RowSettings],
    positions: Sequence[int],
    vocabulary: VocabularyPart,
) -> tuple[mx.array, mx.array]:
    """Score the tokens of each row: the one with the highest score is drawn.

    Args:
        logits: float32 [R, P], bias and penalties applied.
        highest: float32 [R], the highest of all V logits of each row.
        rows: settings of each row, all with a temperature above 0.
        positions: number of tokens before each row's new token in its sequence, prompt included.
        vocabulary: whose part the logits are.

    Returns:
        (scaled, scores), float32 [R, P]: logits divided by the temperature, and these with noise.
    """
    temperatures = mx.array([row.sampling.temperature for row in rows], dtype=mx.float32)
    # The highest logit becomes 0, so that no temperature overflows.
    scaled = (logits - highest[:, None]) / temperatures[:, None]
    row_keys = [
        keys.draw_key(row.key_state, position)
        for row, position in zip(rows, positions, strict=True)
    ]
    return scaled, scaled + vocabulary.own(gumbel_noise(row_keys, vocabulary.size))


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


def likely_enough(scaled: mx.array, rows: Sequence[RowSettings]) -> mx.array:
    """Apply min_p: tell which tokens have at least this part of the likeliest one's probability.

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling" (2024).

    Args:
        scaled: float32 [R, any], logits divided by the temperature, with 0 for the likeliest.
        rows: settings of each row.

    Returns:
        bool with the shape of `scaled`; the likeliest token is always kept.
    """
    min_p = mx.array([row.sampling.min_p for row in rows], dtype=mx.float32)[:, None]
    return (mx.exp(scaled) >= min_p) | (scaled >= 0.0)


def truncate(values: mx.array, rows: Sequence[RowSettings]) -> mx.array:
    """Apply top_k, then top_p (nucleus sampling) to the renormalized rest, then min_p.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020), for top_p.

    Args:
        values: float32 [R, n], the n highest of `scaled` in falling order; n is V, or at least
            top_k of each row.
        rows: settings of each row.

    Returns:
        bool [R, n], whether a token is kept; the likeliest is.
    """
    settings = [row.sampling for row in rows]
    count = values.shape[-1]
    top_k = mx.array([one.top_k or count for one in settings], dtype=mx.uint32)[:, None]
    top_p = mx.array([one.top_p for one in settings], dtype=mx.float32)[:, None]
    ranks = mx.arange(count, dtype=mx.uint32)[None]
    kept = ranks < top_k
    probabilities = mx.softmax(mx.where(kept, values, -mx.inf), axis=-1, precise=True)
    # Probability of all likelier tokens. The token that crosses top_p is kept.
    likelier = mx.cumsum(probabilities, axis=-1, inclusive=False)
    # Rounding may make the sum differ from 1, which must not remove a token where top_p is 1.
    kept = kept & ((likelier < top_p) | (top_p >= 1.0))
    return (kept & likely_enough(values - values[:, :1], rows)) | (ranks == 0)


def draw_truncated(values: mx.array, scores: mx.array, rows: Sequence[RowSettings]) -> mx.array:
    """Return the place, int32 [R], of the token that is drawn from those that `truncate` keeps.

    Args:
        values: float32 [R, n], as for `truncate`.
        scores: float32 [R, n], scores of the same tokens. Truncation does not change which of the
            kept tokens wins, because each keeps its noise.
        rows: settings of each row.
    """
    winner = mx.argmax(mx.where(truncate(values, rows), scores, -mx.inf), axis=-1)
    return winner.astype(mx.int32)
