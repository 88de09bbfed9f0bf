"""Compares the fast path with mlx-lm's own code on this device, before it serves.

Every layer is compared by itself, with rows of different lengths. So errors of rounding do not add
up over the layers, and a layer that computes anything else is found.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import mlx.core as mx
from mlx import nn

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.row_layers import RowLayer
from services.rank_worker.kv_cache.rows.row_views import (
    PROMPT_BLOCK,
    InPlaceView,
    RaggedView,
    UniformView,
)
from services.rank_worker.model.fast_path.comparison import (
    LENGTHS,
    LENGTHS_OF_DRAFTS,
    LENGTHS_OF_KERNELS,
    SHORT_LENGTHS,
    TOKENS_OF_ROW,
    ComparedRows,
    PlainForward,
    calls_replaced,
    graphs_differ,
    in_place_view,
    new_tokens,
    order_of_kernels,
    order_of_prompts,
    ragged_view,
    relative_difference,
    set_view,
)
from services.rank_worker.model.fast_path.kernels.attention.row_places import TILE_TOKENS
from services.rank_worker.model.fast_path.known_form.layer_stack import LayerStack
from services.rank_worker.model.fast_path.row_tiles import TILE_ROWS

Way = Literal["tokens", "prompts", "caches"]
"""How attention is computed: by kernels, for each new token alone or for those of a prompt
together; or by MLX from the rows of caches."""

_OTHER_ARGUMENTS = "layers are given more than a mask and a cache"


def find_difference(
    stack: LayerStack,
    inner: nn.Module,
    plain: PlainForward,
    parts: list[list[BlockPart]],
    kv_bits: int,
) -> str | None:
    """Compare the fast path with mlx-lm's code. Runs the collectives of each layer.

    Args:
        stack: the fast path.
        inner: mlx-lm's model without its head.
        plain: its forward.
        parts: shapes of each layer's keys and values.
        kv_bits: bits per number of stored KV; 0: the model's own dtype.

    Returns:
        What differs, as a clause; None: nothing.
    """
    lengths = LENGTHS_OF_KERNELS if stack.has_kernels else LENGTHS
    rows = [ComparedRows(one, kv_bits) for one in parts]
    # Everything is compared also after a difference: other ranks may not find it, and all must run
    # the same collectives.
    found = [_compare_ends(stack, inner, plain, rows)]
    if found[0] == _OTHER_ARGUMENTS:
        # The layers cannot be called here. All ranks see that, as all run the same code.
        return _OTHER_ARGUMENTS
    blocks: list[Any] = inner.children()["layers"]
    for number, (block, own_rows) in enumerate(zip(blocks, rows, strict=True)):
        differs = _compare_layer(stack, number, block, own_rows, lengths)
        found.append(f"layer {number} differs by {differs:.1%}" if differs else None)
        # Kernels verify drafts and prepare the heads of prompts: both have several tokens per row.
        ways: list[tuple[Way, Sequence[int]]] = []
        ways += [("tokens", LENGTHS_OF_DRAFTS)] if stack.has_kernels else []
        ways += [("caches", lengths)] if stack.has_kernels or stack.is_expanded(number) else []
        for way, of_rows in ways:
            differs = _compare_attention(
                stack, number, block, own_rows, of_rows, TOKENS_OF_ROW, way
            )
            said = f"attention {number} to several new tokens differs by {differs:.1%}"
            found.append(said if differs else None)
    if stack.has_kernels:
        for number in _one_of_each_shape(stack):
            differs = _compare_attention(
                stack, number, blocks[number], rows[number], LENGTHS, 1, "tokens"
            )
            said = f"attention {number} to rows of one tile differs by {differs:.1%}"
            found.append(said if differs else None)
        for of_rows, count in ((lengths, 1), (SHORT_LENGTHS, TOKENS_OF_ROW)):
            differs = _compare_graph(stack, rows, of_rows, order_of_kernels(count))
            found.append(f"the compiled decode differs by {differs:.1%}" if differs else None)
    return next(filter(None, found), None)


def find_difference_of_prompts(
    stack: LayerStack, inner: nn.Module, parts: list[list[BlockPart]]
) -> str | None:
    """Compare kernels that write the rows of prompts with mlx-lm's code.

    Runs the collectives of each layer.

    Args:
        stack: the fast path, whose prompts are written in place.
        inner: mlx-lm's model without its head.
        parts: shapes of each layer's keys and values.

    Returns:
        What differs, as a clause; None: nothing.
    """
    rows = [ComparedRows(one, 0) for one in parts]
    blocks: list[Any] = inner.children()["layers"]
    cases = [(number, LENGTHS_OF_KERNELS, TOKENS_OF_ROW) for number in range(len(blocks))]
    # Several blocks of a prompt.
    cases += [
        (number, LENGTHS, PROMPT_BLOCK + TOKENS_OF_ROW) for number in _one_of_each_shape(stack)
    ]
    found: list[str | None] = []
    for number, lengths, count in cases:
        differs = _compare_attention(
            stack, number, blocks[number], rows[number], lengths, count, "prompts"
        )
        found.append(f"attention {number} differs by {differs:.1%}" if differs else None)
    tokens = order_of_prompts(TOKENS_OF_ROW)
    differs = _compare_graph(stack, rows, SHORT_LENGTHS, tokens, are_prompts=True)
    found.append(f"the compiled forward differs by {differs:.1%}" if differs else None)
    return next(filter(None, found), None)


def depends_on_other_rows(
    stack: LayerStack,
    head: Callable[[mx.array], mx.array],
    parts: list[list[BlockPart]],
    kv_bits: int,
) -> bool:
    """Tell whether results for a row have other bits beside other rows than alone.

    The first layer stands for all, as usually all have matrices of the same shapes.

    Args:
        stack: the fast path.
        head: the model's, [rows, 1, dim] -> [rows, 1, logits].
        parts: shapes of each layer's keys and values.
        kv_bits: bits per number of stored KV; 0: the model's own dtype.
    """
    lengths = [5, *range(2 * TILE_ROWS + 1), TILE_TOKENS + 88]
    count = len(lengths)
    dtype = parts[0][0].dtype
    hidden = mx.random.normal((count, 1, stack.dim), key=mx.random.key(1)).astype(dtype)
    rows = ComparedRows(parts[0], kv_bits).random(count, max(lengths) + 1)
    mx.eval(hidden)
    together = stack.run_layer(0, hidden, _copied(rows, range(count), lengths, stack))
    mx.eval(together)
    for row in (0, count // 2, count - 1):
        cache = _copied(rows, range(row, row + 1), lengths[row : row + 1], stack)
        alone = stack.run_layer(0, hidden[row : row + 1], cache)
        if not mx.array_equal(alone[0], together[row]).item():
            return True
    logits = head(hidden)
    return not mx.array_equal(head(hidden[-1:])[0], logits[-1]).item()


def _copied(rows: RowLayer, chosen: range, lengths: Sequence[int], stack: LayerStack) -> RowLayer:
    """Return copies of a layer's adjacent rows, for a decode with these lengths."""
    cache = copy.copy(rows)
    # Kernels write the copies.
    cache.arrays = [mx.array(one[chosen.start : chosen.stop]) for one in rows.arrays]
    mx.eval(cache.arrays)
    cache.view = UniformView(0, 1, lengths[0], lengths[0] + 1)
    if stack.has_kernels:
        cache.view = InPlaceView(range(len(lengths)), lengths)
    elif len(lengths) > 1:
        cache.view = RaggedView(lengths, range(len(lengths)), 1, max(lengths) + 1)
    cache.offset = cache.view.offset
    return cache


def _compare_ends(
    stack: LayerStack, inner: nn.Module, plain: PlainForward, rows: Sequence[ComparedRows]
) -> str | None:
    """Compare the embedding, the last norm, and the layers' arguments."""
    caches = [one.empty(len(LENGTHS), 1) for one in rows]
    view = ragged_view(LENGTHS)
    for cache in caches:
        set_view(cache, view)
    tokens = mx.array([[1], [2], [3]], dtype=mx.int32)
    calls: list[list[Any]] = []
    with _layers_do_nothing(inner, calls):
        expected = plain(tokens, caches)
    if any(len(given) > 2 for given in calls):
        return _OTHER_ARGUMENTS
    masks = [[one for one in given if not isinstance(one, RowLayer)] for given in calls]
    mask = view.mask(1, None, return_array=False)
    if any(len(given) != 1 or given[0] is not mask for given in masks):
        return "layers attend to some tokens only"
    if not mx.allclose(expected, stack.without_layers(tokens), rtol=1e-2, atol=1e-2).item():
        return "the embedding or the last norm differs"
    return None


def _layers_do_nothing(inner: nn.Module, calls: list[list[Any]]) -> AbstractContextManager[None]:
    """Replace the layers by functions that return their input, and note all that they are given."""

    def call(_block: Any, hidden: mx.array, *others: Any, **named: Any) -> mx.array:
        calls.append([*others, *named.values()])
        return hidden

    blocks: list[Any] = inner.children()["layers"]
    return calls_replaced(blocks, lambda _original: call)


def _compare_layer(
    stack: LayerStack,
    number: int,
    block: Any,
    rows: ComparedRows,
    lengths: Sequence[int],
) -> float:
    """Return the relative difference of a layer's results; 0 if it is within the tolerance.

    Attention is compared alone, and the rest with equal results of it: otherwise rounding of the
    scores could give a token another expert, which is a difference of a tenth.
    """
    way: Way = "tokens" if stack.has_kernels else "caches"
    attention = _compare_attention(stack, number, block, rows, lengths, 1, way)
    return max(attention, _compare_rest(stack, number, block, rows))


def _compare_attention(
    stack: LayerStack,
    number: int,
    block: Any,
    rows: ComparedRows,
    lengths: Sequence[int],
    count: int,
    way: Way,
) -> float:
    """Do so for attention to `count` new tokens per row, computed in this way."""
    hidden, own, other = _random_input(number, block, rows, lengths, count)
    x = block.input_layernorm(hidden)
    view = ragged_view(lengths, count)
    set_view(other, view)
    expected = block.self_attn(x, view.mask(count, None, return_array=False), other)
    set_view(own, view)
    if way != "caches":
        are_prompts = way == "prompts"
        tokens = order_of_prompts(count) if are_prompts else order_of_kernels(count)
        set_view(own, in_place_view(tokens, lengths, are_prompts=are_prompts))
        order = mx.array([slot * count + place for slot, place in tokens], dtype=mx.int32)
        expected, x = (one.reshape(-1, 1, one.shape[-1])[order] for one in (expected, x))
    found = stack.run_attention(number, x, own)
    mx.eval(expected, found, own.arrays, other.arrays)
    written = (new_tokens(one, lengths, count) for one in (other, own))
    pairs = [(expected, found), *zip(*written, strict=True)]
    return max(relative_difference(one, another, one) for one, another in pairs)


def _compare_rest(stack: LayerStack, number: int, block: Any, rows: ComparedRows) -> float:
    """Do so for a layer whose attention has the same result in both, and for the input of that."""
    hidden, cache, _ = _random_input(number, block, rows, LENGTHS, 1)
    attended = (0.1 * mx.random.normal(hidden.shape, key=mx.random.key(3))).astype(hidden.dtype)
    view = ragged_view(LENGTHS)
    set_view(cache, view)
    given: list[mx.array] = []
    with _attention_gives(block, attended, given):
        expected = block(hidden, view.mask(1, None, return_array=False), cache)
    normalized, found = stack.run_rest(number, hidden, attended)
    mx.eval(expected, given, normalized, found)
    pairs = [(expected - hidden, found - hidden, hidden)]
    pairs += [(one, normalized, one) for one in given]
    return max(relative_difference(*pair) for pair in pairs)


def _attention_gives(
    block: Any, result: mx.array, given: list[mx.array]
) -> AbstractContextManager[None]:
    """Replace a layer's attention by a function that returns `result`, and note its input."""

    def call(_attention: Any, x: mx.array, *_others: Any, **_named: Any) -> mx.array:
        given.append(x)
        return result

    return calls_replaced([block.self_attn], lambda _original: call)


def _random_input(
    number: int,
    block: Any,
    rows: ComparedRows,
    lengths: Sequence[int],
    count: int,
) -> tuple[mx.array, RowLayer, RowLayer]:
    """Return a layer's input [3, count, dim], and two caches with the same rows."""
    key, dtype = mx.random.key(number), block.input_layernorm.weight.dtype
    hidden = (0.1 * mx.random.normal((3, count, _width(block)), key=key)).astype(dtype)
    own, other = (rows.random(len(lengths), max(lengths) + count) for _ in range(2))
    mx.eval(hidden)
    return hidden, own, other


def _compare_graph(
    stack: LayerStack,
    rows: Sequence[ComparedRows],
    lengths: Sequence[int],
    places: Sequence[tuple[int, int]],
    *,
    are_prompts: bool = False,
) -> float:
    """Return how much a compiled forward differs from one that is not compiled; 0 if little.

    In short rows most numbers depend on the new tokens that are written first.

    `places`: (slot, place) of each new token.
    """
    tokens, count = mx.arange(1, len(places) + 1, dtype=mx.int32)[:, None], len(places)
    results = []
    for observe in (None, _call):
        caches = [one.empty(len(lengths), max(lengths) + count) for one in rows]
        for cache in caches:
            set_view(cache, in_place_view(places, lengths, are_prompts=are_prompts))
        # A stack whose parts are observed is not compiled.
        stack.observe = observe
        try:
            results.append(stack(tokens, caches))
            mx.eval(results, [cache.arrays for cache in caches])
        finally:
            stack.observe = None
    compiled, measured = results
    return graphs_differ(measured, compiled)


def _call(_module: Any, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _one_of_each_shape(stack: LayerStack) -> list[int]:
    """Return the number of one layer for each shape of attention."""
    return list({shape: place for place, shape in enumerate(stack.shapes)}.values())


def _width(block: Any) -> int:
    return int(block.input_layernorm.weight.shape[0])
