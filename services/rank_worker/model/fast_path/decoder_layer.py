"""One decoder layer of known form, in few operations.

B is the number of rows, L the tokens per row. Between the layers all tokens stand in one matrix
[B * L, dim]: MLX multiplies it as it is, while a third axis costs two operations per product.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.base import scaled_dot_product_attention

from services.rank_worker.kv_cache.rows.row_layers import RowLayer
from services.rank_worker.kv_cache.rows.row_views import InPlaceView
from services.rank_worker.model.fast_path.forms import LayerForm
from services.rank_worker.model.fast_path.gated_mlp import (
    GatedMlp,
    compile_product,
    single_product,
)
from services.rank_worker.model.fast_path.kernels.attention import AttentionWeights, RowPlaces
from services.rank_worker.model.fast_path.kernels.kernels import Kernels
from services.rank_worker.model.fast_path.merged_linear import MergedLinear, SummedLinear

Pair = tuple[mx.array, mx.array]
"""Keys and values of all rows in one layer, [row_count, kv_heads, room, head_dim] each."""


@dataclasses.dataclass(frozen=True, slots=True)
class NewTokens:
    """The new tokens of one forward, for all layers."""

    rows: int
    count: int
    """Per row."""
    offset: int | mx.array
    """Position of each row's first new token: of all rows, or int32 [rows]."""
    tables: dict[int, mx.array]
    """Table of each rotation, by its `id`; not used where the modules rotate."""
    mask: Any = None
    """See `RowLayer.make_mask`."""
    places: RowPlaces | None = None
    """Where a kernel writes them; None: the rows' caches write them."""
    apart: bool = False
    """A row's results must not depend on the other rows."""


class DecoderLayer:
    """One decoder layer."""

    def __init__(self, form: LayerForm, kernels: Kernels | None, *, on_cpu: bool) -> None:
        """Merge the layer's weights; arguments as those of `LayerStack`."""
        self.form = form
        self._kernels = kernels
        attention, shape = form.attention, form.shape
        few_rows = kernels.few_rows if kernels is not None else None
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self._qkv = MergedLinear(projections, few_rows)
        self._output = single_product(attention.o_proj, few_rows)
        self._mlp = GatedMlp(form.mlp, kernels) if form.has_gated_mlp else None
        epsilons = [0.0, 0.0]
        norms = [mx.zeros((1,), dtype=form.input_norm.weight.dtype)] * 2
        if shape.normalizes:
            norms = [attention.q_norm.weight, attention.k_norm.weight]
            epsilons = [attention.q_norm.eps, attention.k_norm.eps]
        self._weights = AttentionWeights(
            norms[0], norms[1], mx.array([form.scale, *epsilons], dtype=mx.float32)
        )
        self._head_norm = self._merge_head_norms() if shape.normalizes else None
        self._prepares_together = on_cpu and epsilons[0] == epsilons[1]
        mx.eval(self._weights.constants, self._head_norm)

    def compile_products(self, *, apart: bool) -> None:
        """Have the kernels of all products compiled, so that no step waits for it.

        Args:
            apart: as for `MergedLinear`.
        """
        self._qkv.compile(apart=apart)
        compile_product(self._output, apart=apart)
        if self._mlp is not None:
            self._mlp.compile(apart=apart)

    @property
    def has_plain_matrices(self) -> bool:
        """See `LayerStack`."""
        has_plain_output = isinstance(self._output, MergedLinear | SummedLinear)
        return self._mlp is not None and self._mlp.has_plain_matrices and has_plain_output

    def _merge_head_norms(self) -> mx.array:
        """Return the norms' weights of all heads of queries and keys, [heads, 1, head_dim]."""
        shape, weights = self.form.shape, self._weights
        rows = [(weights.query_norm, shape.query_heads), (weights.key_norm, shape.kv_heads)]
        return mx.concatenate(
            [mx.broadcast_to(one, (heads, 1, shape.head_dim)) for one, heads in rows]
        )

    def attend(self, normalized: mx.array, cache: RowLayer | Pair, tokens: NewTokens) -> mx.array:
        """Compute the layer's attention, and write new keys and values to the rows.

        Args:
            normalized: [B * L, dim].
            cache: the layer's rows.
            tokens: of this forward.

        Returns:
            [B * L, dim].
        """
        qkv = self._qkv(normalized, apart=tokens.apart)
        table = tokens.tables.get(id(self.form.rotation))
        if tokens.places is not None:
            assert self._kernels is not None
            keys, values = cache.arrays if isinstance(cache, RowLayer) else cache
            attended = self._kernels.attention.attend(
                self.form.shape, self._weights, qkv, keys, values, tokens.places, table
            )
        else:
            assert isinstance(cache, RowLayer)
            attended = self._attend_plainly(qkv, cache, tokens, table)
        output = self._output
        product: mx.array = output(attended, apart=True) if tokens.apart else output(attended)
        return product

    def _attend_plainly(
        self, qkv: mx.array, cache: RowLayer, tokens: NewTokens, table: mx.array | None
    ) -> mx.array:
        shape, form = self.form.shape, self.form
        heads = qkv.reshape(tokens.rows, tokens.count, -1, shape.head_dim).swapaxes(1, 2)
        prepare = self._prepare_together if self._prepares_together else self._prepare_singly
        queries, keys, values = prepare(heads, tokens, table)
        all_keys, all_values = cache.update_and_fetch(keys, values)
        attend = functools.partial(scaled_dot_product_attention, cache=cache, scale=form.scale)
        attended: mx.array
        if tokens.apart:
            attended = _attend_apart(attend, queries, all_keys, all_values, cache)
        else:
            attended = attend(queries, all_keys, all_values, mask=tokens.mask)
        return attended.swapaxes(1, 2).reshape(tokens.rows * tokens.count, -1)

    def _prepare_singly(
        self, heads: mx.array, tokens: NewTokens, _table: mx.array | None
    ) -> list[mx.array]:
        """Split queries, keys and values; normalize and rotate them as mlx-lm does.

        On a GPU each norm and each rotation is one operation.
        """
        shape, attention = self.form.shape, self.form.attention
        borders = [shape.query_heads, shape.query_heads + shape.kv_heads]
        queries, keys, values = mx.split(heads, borders, axis=1)
        if shape.normalizes:
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        if self.form.rotation is not None:
            queries = attention.rope(queries, offset=tokens.offset)
            keys = attention.rope(keys, offset=tokens.offset)
        return [queries, keys, values]

    def _prepare_together(
        self, heads: mx.array, _tokens: NewTokens, table: mx.array | None
    ) -> list[mx.array]:
        """Normalize and rotate queries and keys together, then split them.

        On a CPU norms and rotations are a dozen operations each.
        """
        shape = self.form.shape
        both, values = mx.split(heads, [shape.query_heads + shape.kv_heads], axis=1)
        if self._head_norm is not None:
            epsilon = self.form.attention.q_norm.eps
            both = mx.fast.rms_norm(both, None, epsilon) * self._head_norm
        if self.form.rotation is not None and table is not None:
            both = self.form.rotation.rotate(both, table)
        return [*mx.split(both, [shape.query_heads], axis=1), values]

    def transform(self, normalized: mx.array, tokens: NewTokens) -> mx.array:
        """Compute the layer's MLP: [B * L, dim] -> [B * L, dim]."""
        assert self._mlp is not None
        return self._mlp(normalized, apart=tokens.apart)


def _attend_apart(
    attend: Callable[..., mx.array], queries: mx.array, keys: Any, values: Any, cache: RowLayer
) -> mx.array:
    """Attend row by row: in a row that is as long as the longest one, sums have another order."""
    view = cache.view
    assert not isinstance(view, InPlaceView)
    attended = [
        attend(queries[row : row + 1], _row(keys, row, end), _row(values, row, end), mask=None)
        for row, end in enumerate(view.ends)
    ]
    return attended[0] if len(attended) == 1 else mx.concatenate(attended)


def _row(fetched: Any, row: int, end: int) -> Any:
    """Return one row's keys or values up to its end; of quantized ones all parts."""
    return tree_map(lambda one: one[row : row + 1, :, :end], fetched)
