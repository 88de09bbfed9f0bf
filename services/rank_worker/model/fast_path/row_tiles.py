"""Products in tiles of a fixed number of rows, so that a row's result depends on no other row.

A library adds up in another order for another number of rows. So each product is made of products
of TILE_ROWS rows, of which the last one is padded.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

TILE_ROWS = 8


def multiply_in_tiles(multiply: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """Multiply rows, tile by tile.

    Args:
        multiply: computes [rows, inputs] -> [rows, outputs], each row by itself.
        x: [..., inputs].

    Returns:
        [..., outputs].
    """
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    padding = -count % TILE_ROWS
    if padding:
        rows = mx.pad(rows, [(0, padding), (0, 0)])
    tiles = mx.split(rows, rows.shape[0] // TILE_ROWS) if count > TILE_ROWS else [rows]
    products = [multiply(one) for one in tiles]
    product = products[0] if len(products) == 1 else mx.concatenate(products)
    return product[:count].reshape(*x.shape[:-1], -1)


def tile_head(head: nn.Module) -> None:
    """Have a model's head multiply in tiles.

    Args:
        head: a linear layer, or the embedding that the model also uses as its head.
    """
    original: Any = type(head)
    name = "as_linear" if hasattr(original, "as_linear") else "__call__"

    def call(self: nn.Module, x: mx.array) -> mx.array:
        return multiply_in_tiles(lambda rows: getattr(original, name)(self, rows), x)

    changed: Any = type(original.__name__, (original,), {name: call})
    head.__class__ = changed
