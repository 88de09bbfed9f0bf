"""Compares the fast path with mlx-lm's own code on this device, before it serves.

Every layer is compared by itself, with rows of different lengths. So errors of rounding do not add
up over the layers, and a layer that computes anything else is found.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.row_layers import (
    QuantizedRowLayer,
    RowLayer,
    make_row_layer,
)
from services.rank_worker.kv_cache.rows.row_views import InPlaceView, RaggedView, UniformView
from services.rank_worker.model.fast_path.kernels.row_places import TILE_TOKENS
from services.rank_worker.model.fast_path.layer_stack import LayerStack
from services.rank_worker.model.fast_path.row_tiles import TILE_ROWS

_LENGTHS, _LENGTHS_OF_KERNELS = (0, 5, 37), (0, 37, TILE_TOKENS + 88)
"""Tokens in the rows before the compared decode: an empty row and others, for kernels one of two
tiles."""
_LENGTHS_OF_DRAFTS, _SHORT_LENGTHS = (0, TILE_TOKENS - 1, TILE_TOKENS + 88), (0, 1, 2)
"""The same for several new tokens per row, and for compiled decodes of them."""
_SLOTS = (2, 0, 1)
"""Their places in the arrays, for forwards that need not be in order."""
_TOLERANCE = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 3e-2}
"""Largest relative difference, as a root mean square, of a layer's change to its input."""

_TOKENS_OF_ROW = 3
"""New tokens per row of further comparisons, where several are computed in another way than one."""
_OTHER_ARGUMENTS = "layers are given more than a mask and a cache"

_GRAPH_TOLERANCE = 0.5
"""The same for hidden states after all layers, over which rounding adds up; unrelated ones differ
by 1.4."""

PlainForward = Callable[[mx.array, Sequence[Any]], mx.array]
"""mlx-lm's forward: token ids [B, L] and caches -> hidden states [B, L, dim]."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """How a layer stores its rows."""

    parts: Sequence[BlockPart]
    """Shapes of the keys and of the values that the model computes."""
    bits: int
    """Per stored number; 0: the type that the model computes."""

    def empty(self, count: int, room: int) -> RowLayer:
        """Return rows of zeros."""
        layer = make_row_layer(self.parts, self.bits)
        layer.resize(count, room, 0, 0)
        mx.eval(layer.arrays)
        return layer

    def random(self, count: int, room: int) -> RowLayer:
        """Return rows of random numbers; the same for the same arguments."""
        layer = make_row_layer(self.parts, self.bits)
        layer.arrays = []
        for index, part in enumerate(self.parts):
            shape = (count, part.heads, room, part.dim)
            numbers = mx.random.normal(shape, key=mx.random.key(index + 1)).astype(part.dtype)
            layer.arrays += (
                layer.quantize(numbers) if isinstance(layer, QuantizedRowLayer) else [numbers]
            )
        mx.eval(layer.arrays)
        return layer


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
    lengths = _LENGTHS_OF_KERNELS if stack.has_kernels else _LENGTHS
    rows = [_Rows(one, kv_bits) for one in parts]
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
        # Kernels decode drafts; other forwards of several tokens are without them.
        ways = [(True, _LENGTHS_OF_DRAFTS)] if stack.has_kernels else []
        ways += [(False, lengths)] if stack.is_expanded(number) else []
        for in_place, of_rows in ways:
            differs = _compare_attention(
                stack, number, block, own_rows, of_rows, _TOKENS_OF_ROW, in_place=in_place
            )
            said = f"attention {number} to several new tokens differs by {differs:.1%}"
            found.append(said if differs else None)
    if stack.has_kernels:
        # In short rows most numbers depend on the new tokens that are written first.
        for of_rows, count in ((lengths, 1), (_SHORT_LENGTHS, _TOKENS_OF_ROW)):
            differs = _compare_graph(stack, rows, of_rows, count)
            found.append(f"the compiled decode differs by {differs:.1%}" if differs else None)
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
    rows = _Rows(parts[0], kv_bits).random(count, max(lengths) + 1)
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
    stack: LayerStack, inner: nn.Module, plain: PlainForward, rows: Sequence[_Rows]
) -> str | None:
    """Compare the embedding, the last norm, and the layers' arguments."""
    caches = [one.empty(len(_LENGTHS), 1) for one in rows]
    view = _ragged_view(_LENGTHS)
    for cache in caches:
        _set_view(cache, view)
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


@contextlib.contextmanager
def _layers_do_nothing(inner: nn.Module, calls: list[list[Any]]) -> Iterator[None]:
    """Replace the layers by functions that return their input, and note all that they are given."""
    blocks: list[Any] = inner.children()["layers"]
    originals = [type(one) for one in blocks]

    def call(_block: Any, hidden: mx.array, *others: Any, **named: Any) -> mx.array:
        calls.append([*others, *named.values()])
        return hidden

    for block, original in zip(blocks, originals, strict=True):
        block.__class__ = type(original.__name__, (original,), {"__call__": call})
    try:
        yield
    finally:
        for block, original in zip(blocks, originals, strict=True):
            block.__class__ = original


def _compare_layer(
    stack: LayerStack,
    number: int,
    block: Any,
    rows: _Rows,
    lengths: Sequence[int],
) -> float:
    """Return the relative difference of a layer's results; 0 if it is within the tolerance.

    Attention is compared alone, and the rest with equal results of it: otherwise rounding of the
    scores could give a token another expert, which is a difference of a tenth.
    """
    kernels = stack.has_kernels
    attention = _compare_attention(stack, number, block, rows, lengths, 1, in_place=kernels)
    return max(attention, _compare_rest(stack, number, block, rows))


def _compare_attention(
    stack: LayerStack,
    number: int,
    block: Any,
    rows: _Rows,
    lengths: Sequence[int],
    count: int,
    *,
    in_place: bool,
) -> float:
    """Do so for attention to `count` new tokens per row; `in_place`: kernels compute it."""
    hidden, own, other = _random_input(number, block, rows, lengths, count)
    x = block.input_layernorm(hidden)
    view = _ragged_view(lengths, count)
    _set_view(other, view)
    expected = block.self_attn(x, view.mask(count, None, return_array=False), other)
    _set_view(own, view)
    if in_place:
        tokens = _order_of_kernels(count)
        _set_view(own, _in_place(tokens, lengths))
        order = mx.array([slot * count + place for slot, place in tokens], dtype=mx.int32)
        expected, x = (one.reshape(-1, 1, one.shape[-1])[order] for one in (expected, x))
    found = stack.run_attention(number, x, own)
    mx.eval(expected, found, own.arrays, other.arrays)
    written = (_new_tokens(one, lengths, count) for one in (other, own))
    pairs = [(expected, found), *zip(*written, strict=True)]
    return max(relative_difference(one, another, one) for one, another in pairs)


def _order_of_kernels(count: int) -> list[tuple[int, int]]:
    """Return (slot, place) of `count` new tokens per row; a forward has rows in any order.

    A row's last token comes first, so that it does not find what attention of others has written.
    """
    return [(slot, place) for slot in _SLOTS for place in reversed(range(count))]


def _in_place(tokens: Sequence[tuple[int, int]], lengths: Sequence[int]) -> InPlaceView:
    slots = [slot for slot, _ in tokens]
    before = [lengths[slot] + place for slot, place in tokens]
    return InPlaceView(slots, before, tokens_share_rows=len(tokens) > len(_SLOTS))


def _compare_rest(stack: LayerStack, number: int, block: Any, rows: _Rows) -> float:
    """Do so for a layer whose attention has the same result in both, and for the input of that."""
    hidden, cache, _ = _random_input(number, block, rows, _LENGTHS, 1)
    attended = (0.1 * mx.random.normal(hidden.shape, key=mx.random.key(3))).astype(hidden.dtype)
    view = _ragged_view(_LENGTHS)
    _set_view(cache, view)
    given: list[mx.array] = []
    with _attention_gives(block, attended, given):
        expected = block(hidden, view.mask(1, None, return_array=False), cache)
    normalized, found = stack.run_rest(number, hidden, attended)
    mx.eval(expected, given, normalized, found)
    pairs = [(expected - hidden, found - hidden, hidden)]
    pairs += [(one, normalized, one) for one in given]
    return max(relative_difference(*pair) for pair in pairs)


@contextlib.contextmanager
def _attention_gives(block: Any, result: mx.array, given: list[mx.array]) -> Iterator[None]:
    """Replace a layer's attention by a function that returns `result`, and note its input."""
    attention = block.self_attn
    original = type(attention)

    def call(_attention: Any, x: mx.array, *_others: Any, **_named: Any) -> mx.array:
        given.append(x)
        return result

    attention.__class__ = type(original.__name__, (original,), {"__call__": call})
    try:
        yield
    finally:
        attention.__class__ = original


def _random_input(
    number: int,
    block: Any,
    rows: _Rows,
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
    stack: LayerStack, rows: Sequence[_Rows], lengths: Sequence[int], count: int
) -> float:
    """Return how much a compiled decode differs from one that is not compiled; 0 if little.

    Kernels write rows that MLX does not know to be changed, and use arrays of the whole forward, so
    an error of the graph gives other numbers altogether. `count`: new tokens per row.
    """
    places = _order_of_kernels(count)
    tokens = mx.arange(1, len(places) + 1, dtype=mx.int32)[:, None]
    results = []
    for observe in (None, _call):
        caches = [one.empty(len(lengths), max(lengths) + count) for one in rows]
        for cache in caches:
            _set_view(cache, _in_place(places, lengths))
        # A stack whose parts are observed is not compiled.
        stack.observe = observe
        try:
            results.append(stack(tokens, caches))
            mx.eval(results, [cache.arrays for cache in caches])
        finally:
            stack.observe = None
    compiled, plain = (one.astype(mx.float32) for one in results)
    sizes = mx.square(mx.stack([plain - compiled, plain])).mean(axis=(1, 2, 3))
    differs: float = mx.sqrt(sizes[0] / sizes[1]).item()  # type: ignore[assignment]
    return 0.0 if differs <= _GRAPH_TOLERANCE else differs


def _call(_module: Any, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _new_tokens(cache: RowLayer, lengths: Sequence[int], count: int) -> list[mx.array]:
    """Return the keys and the values that were written, [rows, count, kv_heads, head_dim]."""
    rows = mx.arange(len(lengths))[:, None]
    places = mx.array(list(lengths))[:, None] + mx.arange(count)
    written = [array[rows, :, places] for array in cache.arrays]
    if not isinstance(cache, QuantizedRowLayer):
        return written
    return [
        cache.dequantize((numbers, scales, biases))
        for numbers, scales, biases in (written[:3], written[3:])
    ]


def relative_difference(expected: mx.array, found: mx.array, rounded: mx.array) -> float:
    """Return a relative difference, 0 if rounding may explain it.

    Args:
        expected: numbers.
        found: the same numbers, computed in another way.
        rounded: of the same shape; numbers that had to be rounded to compute these.
    """
    tolerance = _TOLERANCE[rounded.dtype]
    sizes = (
        mx.sqrt(mx.square(one.astype(mx.float32)).mean())
        for one in (expected.astype(mx.float32) - found.astype(mx.float32), expected, rounded)
    )
    values: list[float] = mx.stack(list(sizes)).tolist()  # type: ignore[assignment]
    differs, size, rounding = values
    if differs <= tolerance * size + tolerance / 8 * rounding:
        return 0.0
    return differs / size if size and math.isfinite(differs / size) else 1.0


def _ragged_view(lengths: Sequence[int], count: int = 1) -> RaggedView:
    return RaggedView(lengths, range(len(lengths)), count, max(lengths) + count)


def _set_view(cache: RowLayer, view: RaggedView | InPlaceView) -> None:
    cache.view, cache.offset = view, view.offset


def _width(block: Any) -> int:
    return int(block.input_layernorm.weight.shape[0])
