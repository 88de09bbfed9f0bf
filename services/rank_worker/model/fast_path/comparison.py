"""The common part of comparisons with mlx-lm's code, which come before the fast path serves.

Also replaces calls of mlx-lm's modules for a while.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.row_layers import (
    QuantizedRowLayer,
    RowLayer,
    make_row_layer,
)
from services.rank_worker.kv_cache.rows.row_views import InPlaceView, RaggedView, prompt_blocks
from services.rank_worker.model.fast_path.kernels.attention.row_places import TILE_TOKENS

LENGTHS, LENGTHS_OF_KERNELS = (0, 5, 37), (0, 37, TILE_TOKENS + 88)
"""Tokens in the rows before the compared decode: an empty row and others, for kernels one of two
tiles."""
LENGTHS_OF_DRAFTS, SHORT_LENGTHS = (0, TILE_TOKENS - 1, TILE_TOKENS + 88), (0, 1, 2)
"""The same for several new tokens per row, and for compiled decodes of them."""
TOKENS_OF_ROW = 3
"""New tokens per row of these comparisons."""
_SLOTS = (2, 0, 1)
"""Places of the rows in the arrays, for forwards that need not be in order."""
_TOLERANCE = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 3e-2}
"""Largest relative difference, as a root mean square, of numbers that one layer computes."""

_GRAPH_TOLERANCE = 0.5
"""The same for hidden states after all layers, over which rounding adds up; unrelated ones differ
by 1.4."""

PlainForward = Callable[[mx.array, Sequence[Any]], mx.array]
"""mlx-lm's forward: token ids [B, L] and caches -> hidden states [B, L, dim]."""


@dataclasses.dataclass(frozen=True, slots=True)
class ComparedRows:
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


def order_of_prompts(count: int) -> list[tuple[int, int]]:
    """Return (slot, place) of chunks of `count` tokens, one of each row, side by side."""
    return [(slot, place) for slot in _SLOTS for place in range(count)]


def order_of_kernels(count: int) -> list[tuple[int, int]]:
    """Return (slot, place) of `count` new tokens per row; a forward has rows in any order.

    A row's last token comes first, so that it does not find what attention of others has written.
    """
    return [(slot, place) for slot in _SLOTS for place in reversed(range(count))]


def in_place_view(
    tokens: Sequence[tuple[int, int]], lengths: Sequence[int], *, are_prompts: bool = False
) -> InPlaceView:
    """Return the view of a forward that writes in place.

    Args:
        tokens: (slot, place) of each new token.
        lengths: of the rows.
        are_prompts: they are in the order of `order_of_prompts`.
    """
    slots = [slot for slot, _ in tokens]
    before = [lengths[slot] + place for slot, place in tokens]
    widths = [len(tokens) // len(_SLOTS)] * len(_SLOTS)
    blocks = prompt_blocks(widths) if are_prompts else ()
    return InPlaceView(slots, before, tokens_share_rows=len(tokens) > len(_SLOTS), blocks=blocks)


def new_tokens(cache: RowLayer, lengths: Sequence[int], count: int) -> list[mx.array]:
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


def ragged_view(lengths: Sequence[int], count: int = 1) -> RaggedView:
    """Return the view of a decode of `count` new tokens of each row."""
    return RaggedView(lengths, range(len(lengths)), count, max(lengths) + count)


def set_view(cache: RowLayer, view: RaggedView | InPlaceView) -> None:
    """Have a layer's rows used in a decode."""
    cache.view, cache.offset = view, view.offset


def graphs_differ(expected: mx.array, found: mx.array) -> float:
    """Return the relative difference of hidden states after all layers; 0 if it is little.

    Kernels write rows that MLX does not know to be changed, and use arrays of the whole forward, so
    an error of the graph gives other numbers altogether.
    """
    one, other = expected.astype(mx.float32), found.astype(mx.float32)
    sizes = [mx.square(numbers).mean() for numbers in (one - other, one)]
    differs: float = mx.sqrt(sizes[0] / sizes[1]).item()  # type: ignore[assignment]
    return 0.0 if differs <= _GRAPH_TOLERANCE else differs


@contextlib.contextmanager
def calls_replaced(
    modules: Sequence[Any], calling: Callable[[Any], Callable[..., Any]]
) -> Iterator[None]:
    """Have calls of modules do something else for a while.

    Args:
        modules: of mlx-lm.
        calling: gets a class of theirs, and returns the function that is called with a module of
            that class and the arguments of the call.
    """
    originals = [type(one) for one in modules]
    replaced = {
        kind: type(kind.__name__, (kind,), {"__call__": calling(kind)}) for kind in set(originals)
    }
    for module, original in zip(modules, originals, strict=True):
        module.__class__ = replaced[original]
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.__class__ = original
