"""The forward of a stack of decoder layers of known form, in few operations.

B is the number of rows, L the tokens per row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import scaled_dot_product_attention

from services.rank_worker.kv_cache.rows.row_layers import RowLayer
from services.rank_worker.kv_cache.rows.row_views import InPlaceView
from services.rank_worker.model.fast_path.forms import LayerForm, StackForm
from services.rank_worker.model.fast_path.kernels.kernels import AttentionWeights, Kernels
from services.rank_worker.model.fast_path.merged_linear import MergedLinear
from services.rank_worker.model.fast_path.rotation import Rotation
from services.rank_worker.model.forward import Observe


class _Layer:
    """One decoder layer."""

    def __init__(self, form: LayerForm, kernels: Kernels | None) -> None:
        self.form = form
        self._kernels = kernels
        attention, shape = form.attention, form.shape
        self._qkv = MergedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gate_up: MergedLinear | None = None
        if form.has_gated_mlp:
            self._gate_up = MergedLinear([form.mlp.gate_proj, form.mlp.up_proj])
        dim = form.input_norm.weight.dtype
        epsilons = [0.0, 0.0]
        norms = [mx.zeros((1,), dtype=dim)] * 2
        if shape.normalizes:
            norms = [attention.q_norm.weight, attention.k_norm.weight]
            epsilons = [attention.q_norm.eps, attention.k_norm.eps]
        self._weights = AttentionWeights(
            norms[0], norms[1], mx.array([form.scale, *epsilons], dtype=mx.float32)
        )
        self._head_norm = self._merge_head_norms(epsilons)
        mx.eval(self._weights.constants, self._head_norm)

    def _merge_head_norms(self, epsilons: Sequence[float]) -> mx.array | None:
        """Return the norms' weights of all heads of queries and keys, [heads, 1, head_dim].

        None if queries and keys cannot be normalized together.
        """
        shape, weights = self.form.shape, self._weights
        if not shape.normalizes or epsilons[0] != epsilons[1]:
            return None
        rows = [(weights.query_norm, shape.query_heads), (weights.key_norm, shape.kv_heads)]
        return mx.concatenate(
            [mx.broadcast_to(one, (heads, 1, shape.head_dim)) for one, heads in rows]
        )

    def attend(
        self, normalized: mx.array, cache: RowLayer, mask: Any, table: mx.array | None
    ) -> mx.array:
        """Compute the layer's attention, and write new keys and values to the rows.

        Args:
            normalized: [B, L, dim].
            cache: the layer's rows.
            mask: see `RowLayer.make_mask`; not used where the kernel attends.
            table: of the layer's rotation; None: heads are not rotated.

        Returns:
            [B, L, dim].
        """
        qkv = self._qkv(normalized)
        view = cache.view
        if self._kernels is not None and isinstance(view, InPlaceView):
            rotations = table if table is not None else view.lengths.astype(mx.float32)
            keys, values = cache.arrays
            attended = self._kernels.attend(
                self.form.shape, self._weights, qkv, keys, values, view, rotations
            )
        else:
            attended = self._attend_plainly(qkv, cache, mask, table)
        change: mx.array = self.form.attention.o_proj(attended)
        return change

    def _attend_plainly(
        self, qkv: mx.array, cache: RowLayer, mask: Any, table: mx.array | None
    ) -> mx.array:
        shape, form = self.form.shape, self.form
        rows, count, _ = qkv.shape
        rotated_heads = shape.query_heads + shape.kv_heads
        heads = qkv.reshape(rows, count, -1, shape.head_dim).swapaxes(1, 2)
        both, values = mx.split(heads, [rotated_heads], axis=1)
        if self._head_norm is not None:
            both = mx.fast.rms_norm(both, None, form.attention.q_norm.eps) * self._head_norm
        elif shape.normalizes:
            queries, keys = mx.split(both, [shape.query_heads], axis=1)
            both = mx.concatenate(
                [form.attention.q_norm(queries), form.attention.k_norm(keys)], axis=1
            )
        if form.rotation is not None and table is not None:
            both = form.rotation.rotate(both, table)
        queries, keys = mx.split(both, [shape.query_heads], axis=1)
        all_keys, all_values = cache.update_and_fetch(keys, values)
        attended: mx.array = scaled_dot_product_attention(
            queries, all_keys, all_values, cache=cache, scale=form.scale, mask=mask
        )
        return attended.swapaxes(1, 2).reshape(rows, count, -1)

    def transform(self, normalized: mx.array) -> mx.array:
        """Compute the layer's MLP: [B, L, dim] -> [B, L, dim]."""
        change: mx.array
        if self._gate_up is None:
            change = self.form.mlp(normalized)
            return change
        gate_up = self._gate_up(normalized)
        if self._kernels is not None:
            product = self._kernels.silu_product(gate_up)
        else:
            product = swiglu(*mx.split(gate_up, 2, axis=-1))
        change = self.form.mlp.down_proj(product)
        return change


class LayerStack:
    """A model without its head: token ids -> hidden states after the last norm."""

    def __init__(self, form: StackForm, kernels: Kernels | None) -> None:
        """Merge the weights of all layers; waits for the device.

        Args:
            form: the model's modules, with their weights in memory.
            kernels: of the device; None: MLX's operations are used.
        """
        self._form = form
        self._kernels = kernels
        self._layers: list[_Layer] = []
        for one in form.layers:
            self._layers.append(_Layer(one, kernels))
            # The merged weights replace those that the modules have held.
            mx.clear_cache()
        norms = [one.mlp_norm for one in form.layers]
        norms += [one.input_norm for one in form.layers[1:]] + [form.norm]
        self._epsilons = {
            id(norm): mx.array([norm.eps], dtype=mx.float32) for norm in [*norms, form.norm]
        }
        mx.eval(list(self._epsilons.values()))
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
        first = caches[0]
        mask = None
        if not isinstance(first.view, InPlaceView):
            mask = first.make_mask(tokens.shape[1])
        tables = self._rotation_tables(first.offset, tokens)
        hidden: mx.array = self._form.embedding(tokens)
        normalized: mx.array = self._form.layers[0].input_norm(hidden)
        following = [one.input_norm for one in self._form.layers[1:]] + [self._form.norm]
        for layer, cache, norm in zip(self._layers, caches, following, strict=True):
            table = tables.get(id(layer.form.rotation))
            attention, mlp = layer.form.attention, layer.form.mlp
            change = self._part(attention, layer.attend, normalized, cache, mask, table)
            hidden, normalized = self._add_norm(hidden, change, layer.form.mlp_norm)
            if layer.form.has_gated_mlp:
                change = self._part(mlp, layer.transform, normalized)
            else:
                change = layer.transform(normalized)
            hidden, normalized = self._add_norm(hidden, change, norm)
        return normalized

    def without_layers(self, tokens: mx.array) -> mx.array:
        """Return what the forward would be if no layer changed its input, for the proof."""
        normalized: mx.array = self._form.norm(self._form.embedding(tokens))
        return normalized

    def block(self, number: int, hidden: mx.array, cache: RowLayer) -> mx.array:
        """Build one layer, for the proof: [B, L, dim] -> [B, L, dim].

        Args:
            number: of the layer.
            hidden: its input.
            cache: its rows.
        """
        layer, view = self._layers[number], cache.view
        mask = None if isinstance(view, InPlaceView) else cache.make_mask(hidden.shape[1])
        tables = self._rotation_tables(cache.offset, hidden[..., 0])
        table = tables.get(id(layer.form.rotation))
        normalized = layer.form.input_norm(hidden)
        change = layer.attend(normalized, cache, mask, table)
        hidden, normalized = self._add_norm(hidden, change, layer.form.mlp_norm)
        return self._add_norm(hidden, layer.transform(normalized), layer.form.mlp_norm)[0]

    def _part(self, module: Any, function: Callable[..., Any], *args: Any) -> Any:
        if self.observe is None:
            return function(*args)
        return self.observe(module, function, *args)

    def _rotation_tables(self, offset: int | mx.array, tokens: mx.array) -> dict[int, mx.array]:
        """Return the table of each rotation, by `id`."""
        rows, count = tokens.shape
        rotations: dict[int, Rotation] = {
            id(one.rotation): one.rotation for one in self._form.layers if one.rotation is not None
        }
        return {key: one.table(offset, count, rows) for key, one in rotations.items()}

    def _add_norm(self, hidden: mx.array, change: mx.array, norm: Any) -> tuple[mx.array, mx.array]:
        if self._kernels is not None:
            return self._kernels.add_norm(hidden, change, norm.weight, self._epsilons[id(norm)])
        hidden = hidden + change
        return hidden, norm(hidden)
