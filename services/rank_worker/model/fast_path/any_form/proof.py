"""Compares decodes by kernels with mlx-lm's own, on this device, before they serve.

Attention and merged products are computed in another way, so each kind of attention and each
product are compared by themselves, and, since MLX orders the operations of a graph, whole decodes.
"""

from collections.abc import Sequence

import mlx.core as mx

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.row_layers import QuantizedRowLayer, RowLayer
from services.rank_worker.model.fast_path.any_form.family_layers import (
    FamilyLayers,
    FullAttention,
)
from services.rank_worker.model.fast_path.comparison import (
    LENGTHS,
    LENGTHS_OF_DRAFTS,
    LENGTHS_OF_KERNELS,
    SHORT_LENGTHS,
    TOKENS_OF_ROW,
    ComparedRows,
    PlainForward,
    graphs_differ,
    in_place_view,
    new_tokens,
    order_of_kernels,
    ragged_view,
    relative_difference,
    set_view,
)
from services.rank_worker.model.fast_path.kernels.attention.row_places import RowPlaces


def find_difference(
    layers: FamilyLayers,
    plain: PlainForward,
    parts: list[list[BlockPart]],
    kv_bits: int,
) -> str | None:
    """Compare decodes with mlx-lm's. Runs the collectives of some forwards.

    Args:
        layers: the decodes.
        plain: mlx-lm's forward.
        parts: shapes of each layer's keys and values.
        kv_bits: bits per number of stored KV; 0: the model's own dtype.

    Returns:
        What differs, as a clause; None: nothing.
    """
    rows = [ComparedRows(one, kv_bits) for one in parts]
    # All ranks run the same collectives, so everything is compared also after a difference.
    differs = max(layers.products.compare(), default=0.0)
    found = [f"a merged product differs by {differs:.1%}" if differs else None]
    for lengths, count in ((LENGTHS_OF_KERNELS, 1), (SHORT_LENGTHS, TOKENS_OF_ROW)):
        differs = _compare_decode(layers, plain, rows, lengths, count)
        found.append(f"the compiled decode differs by {differs:.1%}" if differs else None)
    return next(filter(None, found), None)


def find_fault(layers: FamilyLayers, parts: list[list[BlockPart]], kv_bits: int) -> str:
    """Compare attention with MLX's, and build decodes without computing them. No collectives.

    Args:
        layers: the decodes.
        parts: shapes of each layer's keys and values.
        kv_bits: bits per number of stored KV; 0: the model's own dtype.

    Returns:
        Why they cannot serve, as a clause; "" if they can.
    """
    rows = [ComparedRows(one, kv_bits) for one in parts]
    attentions = layers.form.attentions
    ways = ((LENGTHS, 1), (LENGTHS_OF_KERNELS, 1), (LENGTHS_OF_DRAFTS, TOKENS_OF_ROW))
    for number in {one: place for place, one in enumerate(attentions)}.values():
        for lengths, count in ways:
            differs = _compare_attention(layers, attentions[number], rows[number], lengths, count)
            if differs:
                return f"attention {number} differs by {differs:.1%}"
    for count in (1, TOKENS_OF_ROW):
        _decode(layers, rows, SHORT_LENGTHS, count)
    return ""


def _compare_attention(
    layers: FamilyLayers,
    attention: FullAttention,
    rows: ComparedRows,
    lengths: Sequence[int],
    count: int,
) -> float:
    """Return the relative difference of results and written tokens; 0 if it is tolerated."""
    shape = attention.shape
    heads = (shape.query_heads, shape.kv_heads, shape.kv_heads)
    new = [
        mx.random.normal((len(lengths), one, count, shape.head_dim), key=mx.random.key(place))
        for place, one in enumerate(heads)
    ]
    new = [one.astype(rows.parts[0].dtype) for one in new]
    own, other = (rows.random(len(lengths), max(lengths) + count) for _ in range(2))
    view = ragged_view(lengths, count)
    set_view(other, view)
    expected = _attend_plainly(
        new, other, attention.scale, view.mask(count, None, return_array=True)
    )
    tokens = order_of_kernels(count)
    slots = mx.array([slot for slot, _ in tokens], dtype=mx.int32)
    columns = mx.array([place for _, place in tokens], dtype=mx.int32)
    places = RowPlaces.of(in_place_view(tokens, lengths))
    queries, keys, values = (one[slots, :, columns][:, :, None] for one in new)
    found = layers.attend(attention, [queries, keys, values], own.arrays, places)
    expected = expected[slots, :, columns][:, :, None]
    mx.eval(expected, found, own.arrays, other.arrays)
    written = (new_tokens(one, lengths, count) for one in (other, own))
    pairs = [(expected, found), *zip(*written, strict=True)]
    return max(relative_difference(one, another, one) for one, another in pairs)


def _attend_plainly(
    new: Sequence[mx.array], cache: RowLayer, scale: float, mask: mx.array
) -> mx.array:
    """Write new keys and values as MLX does, and attend: like the queries."""
    queries, *stored = new
    fetched = cache.update_and_fetch(stored[0], stored[1])
    keys, values = (
        one if isinstance(one, mx.array) else _as_numbers(cache, one) for one in fetched
    )
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def _as_numbers(cache: RowLayer, stored: tuple[mx.array, mx.array, mx.array]) -> mx.array:
    assert isinstance(cache, QuantizedRowLayer)
    return cache.dequantize(stored)


def _compare_decode(
    layers: FamilyLayers,
    plain: PlainForward,
    rows: Sequence[ComparedRows],
    lengths: Sequence[int],
    count: int,
) -> float:
    """Return how much a compiled decode of `count` tokens per row differs; 0 if little."""
    found = _decode(layers, rows, lengths, count)
    others = [one.empty(len(lengths), max(lengths) + count) for one in rows]
    for other in others:
        set_view(other, ragged_view(lengths, count))
    of_rows, slots, columns = _tokens(len(lengths), count)
    expected = plain(of_rows, others)[slots, columns][:, None]
    mx.eval(found, expected, [one.arrays for one in others])
    return graphs_differ(expected, found)


def _decode(
    layers: FamilyLayers, rows: Sequence[ComparedRows], lengths: Sequence[int], count: int
) -> mx.array:
    """Build a decode of `count` tokens per row: [tokens, 1, dim]."""
    caches = [one.empty(len(lengths), max(lengths) + count) for one in rows]
    for cache in caches:
        set_view(cache, in_place_view(order_of_kernels(count), lengths))
    of_rows, slots, columns = _tokens(len(lengths), count)
    return layers(of_rows[slots, columns][:, None], caches)


def _tokens(rows: int, count: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return token ids, [rows, count], and the slots and columns of kernels' tokens in order."""
    places = order_of_kernels(count)
    slots = mx.array([slot for slot, _ in places], dtype=mx.int32)
    columns = mx.array([place for _, place in places], dtype=mx.int32)
    return mx.arange(1, rows * count + 1, dtype=mx.int32).reshape(rows, count), slots, columns
