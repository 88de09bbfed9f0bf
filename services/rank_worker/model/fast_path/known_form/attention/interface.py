"""What a layer needs of its attention, in any form.

B is the number of rows, L the tokens per row.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map

from services.rank_worker.kv_cache.rows.row_layers import RowLayer
from services.rank_worker.kv_cache.rows.row_views import ConcatenatedView, InPlaceView
from services.rank_worker.model.fast_path.compiled_forwards import RowArrays
from services.rank_worker.model.fast_path.kernels.attention.row_places import RowPlaces
from services.rank_worker.model.fast_path.kernels.kernels import Kernels, Shape
from services.rank_worker.model.fast_path.known_form.rotation import Rotation, read_rotation
from services.rank_worker.model.fast_path.merged_linear import Product
from services.rank_worker.model.fast_path.unknown_form import UnknownForm
from services.rank_worker.model.sharding.mlp_split import is_linear


@dataclasses.dataclass(frozen=True, slots=True)
class NewTokens:
    """The new tokens of one forward, for all layers."""

    rows: int
    count: int
    """Per row."""
    tables: dict[int, mx.array]
    """Table of each rotation, by its `id`; not used where the modules rotate."""
    offset: int | mx.array | None = None
    """Position of each row's first new token, where the modules may rotate: of all rows, or int32
    [rows]. None: only the tables tell positions."""
    mask: Any = None
    """See `RowLayer.make_mask`."""
    places: RowPlaces | None = None
    """Where a kernel writes them; None: the rows' caches write them."""
    invariant: bool = False
    """A row's results must not depend on the other rows."""
    are_concatenated: bool = False
    """They are chunks of several rows side by side."""
    leaves_summand: bool = False
    """The result of a divided attention or MLP is this rank's summand; the norm that follows sums
    over ranks."""


class Attention(Protocol):
    """Computes the attention of one layer."""

    def attend(
        self, normalized: mx.array, cache: RowLayer | RowArrays, tokens: NewTokens
    ) -> mx.array:
        """Compute attention, and write new keys and values to the rows.

        Args:
            normalized: [B * L, dim].
            cache: the layer's rows.
            tokens: of this forward.

        Returns:
            [B * L, dim]; this rank's summand, if `is_divided` and `tokens.leaves_summand`.
        """

    @property
    def is_divided(self) -> bool:
        """Whether the result is a sum over ranks."""

    def compile_products(self, *, invariant: bool) -> None:
        """Have the kernels of all products compiled; `invariant` as for `Product`."""

    @property
    def has_plain_matrices(self) -> bool:
        """See `LayerStack`."""


class AttentionForm(Protocol):
    """The modules of one layer's attention, and their shapes."""

    @property
    def module(self) -> Any:
        """mlx-lm's module."""

    @property
    def shape(self) -> Shape:
        """What its kernels are compiled for."""

    @property
    def rotation(self) -> Rotation | None:
        """Of queries and keys; None: they are not rotated."""

    @property
    def is_expanded(self) -> bool:
        """Whether several new tokens per row are computed in another way than one.

        Then mlx-lm masks scores itself, with an array.
        """

    @property
    def can_concatenate(self) -> bool:
        """Whether chunks of several rows can be computed side by side."""

    def open(self, kernels: Kernels | None, *, on_cpu: bool) -> Attention:
        """Merge the weights; arguments as those of `LayerStack`. Waits for the device."""


def multiply_last(product: Product, attended: mx.array, tokens: NewTokens) -> mx.array:
    """Multiply the results of attention with a layer's last matrix.

    Args:
        product: with the matrix.
        attended: [B * L, inputs].
        tokens: of this forward.

    Returns:
        [B * L, dim]; this rank's summand, if the matrix is divided and `tokens.leaves_summand`.
    """
    if tokens.leaves_summand:
        return product.own_part(attended, invariant=tokens.invariant)
    return product(attended, invariant=tokens.invariant)


def attend_row_by_row(
    attend: Callable[..., mx.array],
    queries: Sequence[mx.array],
    fetched: Sequence[Any],
    cache: RowLayer,
) -> mx.array:
    """Attend row by row: in a row that is as long as the longest one, sums have another order.

    Args:
        attend: called as `attend(*queries, *fetched, mask=None)` with those of one row.
        queries: arrays [rows, ...].
        fetched: result of the cache's `update_and_fetch`.
        cache: of the layer.
    """
    view = cache.view
    assert not isinstance(view, InPlaceView | ConcatenatedView)
    attended = [
        attend(
            *(one[row : row + 1] for one in queries),
            *(_row(one, row, end) for one in fetched),
            mask=None,
        )
        for row, end in enumerate(view.ends)
    ]
    return attended[0] if len(attended) == 1 else mx.concatenate(attended)


def _row(fetched: Any, row: int, end: int) -> Any:
    """Return one row's keys or values up to its end; of quantized ones all parts."""
    return tree_map(lambda one: one[row : row + 1, :, :end], fetched)


def share_rotation(rope: Any, head_dim: int, known: list[Rotation]) -> Rotation | None:
    """Return a layer's rotation, the known one where it is equal, so that layers share tables.

    Args:
        rope: mlx-lm's module; None: nothing is rotated.
        head_dim: numbers that it is given per head.
        known: rotations of earlier layers; a new one is added.

    Raises:
        UnknownForm: it does not rotate pairs.
    """
    if rope is None:
        return None
    rotation = read_rotation(rope, head_dim)
    if rotation is None:
        raise UnknownForm(f"{type(rope).__name__} is no rotation of pairs")
    for one in known:
        if one.equals(rotation):
            return one
    known.append(rotation)
    return rotation


def is_linear_like(module: Any) -> bool:
    """Tell whether a module is one matrix, whole or divided over ranks."""
    return is_linear(module) or (
        isinstance(module, nn.Module)
        and isinstance(module.get("weight"), mx.array)
        and "Sharded" in type(module).__name__
    )


def as_rms_norm(module: Any, name: str) -> nn.RMSNorm:
    """Return a module that must be an RMS norm.

    Args:
        module: of a layer.
        name: of the module there.

    Raises:
        UnknownForm: it is something else.
    """
    if type(module) is not nn.RMSNorm:
        raise UnknownForm(f"{name} is a {type(module).__name__}")
    return module
