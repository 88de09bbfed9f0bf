"""The forward of a stack of decoder layers of known form, in few operations.

B is the number of rows, L the tokens per row. Between the layers all tokens stand in one matrix
[B * L, dim]: MLX multiplies it as it is, while a third axis costs two operations per product.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import scaled_dot_product_attention

from services.rank_worker.kv_cache.rows.row_layers import RowLayer
from services.rank_worker.kv_cache.rows.row_views import InPlaceView
from services.rank_worker.model.fast_path.forms import LayerForm, StackForm
from services.rank_worker.model.fast_path.kernels.few_rows import FewRows
from services.rank_worker.model.fast_path.kernels.kernels import (
    AttentionWeights,
    Kernels,
    RowPlaces,
    tile_count,
)
from services.rank_worker.model.fast_path.merged_linear import (
    MergedLinear,
    SummedLinear,
    can_merge,
    can_sum,
)
from services.rank_worker.model.fast_path.rotation import Rotation
from services.rank_worker.model.forward import Observe

Pair = tuple[mx.array, mx.array]
"""Keys and values of all rows in one layer, [row_count, kv_heads, room, head_dim] each."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Tokens:
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
        self._output = _single(attention.o_proj, few_rows)
        self._gate_up: MergedLinear | None = None
        if form.has_gated_mlp:
            self._gate_up = MergedLinear([form.mlp.gate_proj, form.mlp.up_proj], few_rows)
            self._down = _single(form.mlp.down_proj, few_rows)
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

    def compile_products(self) -> None:
        """Have the kernels of all products compiled, so that no step waits for it."""
        self._qkv.compile()
        singles = [self._output]
        if self._gate_up is not None:
            self._gate_up.compile(gated=True)
            singles.append(self._down)
        for one in singles:
            part = one.part if isinstance(one, SummedLinear) else one
            if isinstance(part, MergedLinear):
                part.compile()

    def _merge_head_norms(self) -> mx.array:
        """Return the norms' weights of all heads of queries and keys, [heads, 1, head_dim]."""
        shape, weights = self.form.shape, self._weights
        rows = [(weights.query_norm, shape.query_heads), (weights.key_norm, shape.kv_heads)]
        return mx.concatenate(
            [mx.broadcast_to(one, (heads, 1, shape.head_dim)) for one, heads in rows]
        )

    def attend(self, normalized: mx.array, cache: RowLayer | Pair, tokens: _Tokens) -> mx.array:
        """Compute the layer's attention, and write new keys and values to the rows.

        Args:
            normalized: [B * L, dim].
            cache: the layer's rows.
            tokens: of this forward.

        Returns:
            [B * L, dim].
        """
        qkv = self._qkv(normalized)
        table = tokens.tables.get(id(self.form.rotation))
        if tokens.places is not None:
            assert self._kernels is not None
            keys, values = cache.arrays if isinstance(cache, RowLayer) else cache
            attended = self._kernels.attend(
                self.form.shape, self._weights, qkv, keys, values, tokens.places, table
            )
        else:
            assert isinstance(cache, RowLayer)
            attended = self._attend_plainly(qkv, cache, tokens, table)
        change: mx.array = self._output(attended)
        return change

    def _attend_plainly(
        self, qkv: mx.array, cache: RowLayer, tokens: _Tokens, table: mx.array | None
    ) -> mx.array:
        shape, form = self.form.shape, self.form
        heads = qkv.reshape(tokens.rows, tokens.count, -1, shape.head_dim).swapaxes(1, 2)
        prepare = self._prepare_together if self._prepares_together else self._prepare_apart
        queries, keys, values = prepare(heads, tokens, table)
        all_keys, all_values = cache.update_and_fetch(keys, values)
        attended: mx.array = scaled_dot_product_attention(
            queries, all_keys, all_values, cache=cache, scale=form.scale, mask=tokens.mask
        )
        return attended.swapaxes(1, 2).reshape(tokens.rows * tokens.count, -1)

    def _prepare_apart(
        self, heads: mx.array, tokens: _Tokens, _table: mx.array | None
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
        self, heads: mx.array, _tokens: _Tokens, table: mx.array | None
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

    def transform(self, normalized: mx.array) -> mx.array:
        """Compute the layer's MLP: [B * L, dim] -> [B * L, dim]."""
        assert self._gate_up is not None
        product = self._gate_up.gate(normalized)
        if product is None:
            gate_up = self._gate_up(normalized)
            if self._kernels is not None:
                product = self._kernels.silu_product(gate_up)
            else:
                product = swiglu(*mx.split(gate_up, 2, axis=-1))
        change: mx.array = self._down(product)
        return change


class LayerStack:
    """A model without its head: token ids -> hidden states after the last norm."""

    def __init__(self, form: StackForm, kernels: Kernels | None, *, on_cpu: bool) -> None:
        """Merge the weights of all layers; waits for the device.

        Args:
            form: the model's modules, with their weights in memory.
            kernels: of the device; None: MLX's operations are used.
            on_cpu: whether the model runs on the CPU.
        """
        self._form = form
        self._kernels = kernels
        self._layers: list[DecoderLayer] = []
        for one in form.layers:
            self._layers.append(DecoderLayer(one, kernels, on_cpu=on_cpu))
            # The merged weights replace those that the modules have held.
            mx.clear_cache()
        # All layers have matrices of the same shapes.
        self._layers[0].compile_products()
        self._following = [*(one.input_norm for one in form.layers[1:]), form.norm]
        norms = [*(one.mlp_norm for one in form.layers), *self._following]
        self._epsilons = {id(norm): mx.array([norm.eps], dtype=mx.float32) for norm in norms}
        mx.eval(list(self._epsilons.values()))
        self._rotations: dict[int, Rotation] = {
            id(one.rotation): one.rotation for one in form.layers if one.rotation is not None
        }
        self._compiles = kernels is not None and all(one.has_gated_mlp for one in form.layers)
        """Experts are counted while their graph is built, so it must be built for each step."""
        self._compiled: dict[int, Callable[..., mx.array]] = {}
        """The decode, by the number of tiles."""
        self.observe: Observe | None = None
        """Calls the parts of the layers while a step is measured; None: nothing is measured."""

    @property
    def has_kernels(self) -> bool:
        """Whether decodes write rows in place, see `InPlaceView`."""
        return self._kernels is not None

    def __call__(self, tokens: mx.array, caches: Sequence[RowLayer]) -> mx.array:
        """Build a forward.

        Args:
            tokens: int32 [B, L].
            caches: one per layer.

        Returns:
            [B, L, dim].
        """
        rows, count = tokens.shape
        view = caches[0].view
        if isinstance(view, InPlaceView):
            hidden = self._decode(tokens.reshape(-1), view, caches)
        else:
            new = _Tokens(
                rows,
                count,
                caches[0].offset,
                self._tables(caches[0].offset, rows, count),
                caches[0].make_mask(count),
            )
            hidden = self._run(tokens.reshape(-1), caches, new)
        return hidden.reshape(rows, count, -1)

    def _decode(self, tokens: mx.array, view: InPlaceView, caches: Sequence[RowLayer]) -> mx.array:
        tiles = tile_count(view.longest)
        arrays = [array for cache in caches for array in cache.arrays]
        if self.observe is not None or not self._compiles:
            return self._decode_in_place(tiles, tokens, view.lengths, view.slots, *arrays)
        if tiles not in self._compiled:
            decode = functools.partial(self._decode_in_place, tiles)
            self._compiled[tiles] = mx.compile(decode)
        return self._compiled[tiles](tokens, view.lengths, view.slots, *arrays)

    def _decode_in_place(
        self, tiles: int, tokens: mx.array, lengths: mx.array, slots: mx.array, *arrays: mx.array
    ) -> mx.array:
        """Build a decode whose kernels write the rows.

        Args:
            tiles: of the longest row.
            tokens: int32 [B].
            lengths: see `RowPlaces`; so is `slots`.
            slots: of the rows.
            arrays: keys and values of each layer in turn.
        """
        rows = tokens.shape[0]
        places = RowPlaces(lengths, slots, tiles)
        new = _Tokens(rows, 1, lengths, self._tables(lengths, rows, 1), places=places)
        pairs = list(zip(arrays[::2], arrays[1::2], strict=True))
        return self._run(tokens, pairs, new)

    def _run(
        self, tokens: mx.array, caches: Sequence[RowLayer] | Sequence[Pair], new: _Tokens
    ) -> mx.array:
        hidden: mx.array = self._form.embedding(tokens)
        normalized: mx.array = self._form.layers[0].input_norm(hidden)
        for place, (layer, norm) in enumerate(zip(self._layers, self._following, strict=True)):
            cache = caches[place]
            hidden, normalized = self._run_layer(layer, cache, new, hidden, normalized, norm)
        return normalized

    def _run_layer(
        self,
        layer: DecoderLayer,
        cache: RowLayer | Pair,
        new: _Tokens,
        hidden: mx.array,
        normalized: mx.array,
        norm: Any,
    ) -> Pair:
        form = layer.form
        change = self._part(form.attention, layer.attend, normalized, cache, new)
        hidden, normalized = self._add_norm(hidden, change, form.mlp_norm)
        if form.has_gated_mlp:
            change = self._part(form.mlp, layer.transform, normalized)
        else:
            shaped = normalized.reshape(new.rows, new.count, -1)
            change = form.mlp(shaped).reshape(normalized.shape)
        return self._add_norm(hidden, change, norm)

    def without_layers(self, tokens: mx.array) -> mx.array:
        """Return what the forward would be if no layer changed its input, for the proof."""
        normalized: mx.array = self._form.norm(self._form.embedding(tokens))
        return normalized

    def run_layer(self, number: int, hidden: mx.array, cache: RowLayer) -> mx.array:
        """Build one layer, for the proof.

        Args:
            number: of the layer.
            hidden: its input, [B, 1, dim].
            cache: its rows.

        Returns:
            Its output, [B, 1, dim].
        """
        layer, view, rows = self._layers[number], cache.view, hidden.shape[0]
        mask = places = None
        if isinstance(view, InPlaceView):
            places = RowPlaces(view.lengths, view.slots, tile_count(view.longest))
        else:
            mask = cache.make_mask(1)
        new = _Tokens(rows, 1, cache.offset, self._tables(cache.offset, rows, 1), mask, places)
        flat = hidden.reshape(rows, -1)
        normalized = layer.form.input_norm(flat)
        output, _ = self._run_layer(layer, cache, new, flat, normalized, layer.form.mlp_norm)
        return output.reshape(hidden.shape)

    def _part(self, module: Any, function: Callable[..., Any], *args: Any) -> Any:
        if self.observe is None:
            return function(*args)
        return self.observe(module, function, *args)

    def _tables(self, offset: int | mx.array, rows: int, count: int) -> dict[int, mx.array]:
        """Return the table of each rotation, by `id`."""
        return {key: one.table(offset, count, rows) for key, one in self._rotations.items()}

    def _add_norm(self, hidden: mx.array, change: mx.array, norm: Any) -> Pair:
        if self._kernels is not None:
            return self._kernels.add_norm(hidden, change, norm.weight, self._epsilons[id(norm)])
        hidden = hidden + change
        return hidden, norm(hidden)


def _single(module: Any, few_rows: FewRows | None) -> Any:
    """Return a matrix whose product is one operation, and a sum if it is divided by its inputs."""
    if can_sum(module):
        return SummedLinear(module, few_rows)
    return MergedLinear([module], few_rows) if can_merge([module]) else module
