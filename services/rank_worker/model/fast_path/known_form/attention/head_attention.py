"""Attention with keys and values of one width per head.

B is the number of rows, L the tokens per row.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.row_layers import RowLayer
from services.rank_worker.kv_cache.rows.row_views import ConcatenatedView
from services.rank_worker.model.fast_path.compiled_forwards import RowArrays
from services.rank_worker.model.fast_path.kernels.attention.head_kernels import (
    AttentionShape,
    AttentionWeights,
)
from services.rank_worker.model.fast_path.kernels.dialects import device_numbers
from services.rank_worker.model.fast_path.kernels.kernels import Kernels
from services.rank_worker.model.fast_path.known_form.attention.interface import (
    NewTokens,
    as_rms_norm,
    attend_row_by_row,
    is_linear_like,
    multiply_last,
    share_rotation,
)
from services.rank_worker.model.fast_path.known_form.rotation import Rotation
from services.rank_worker.model.fast_path.merged_linear import (
    MergedLinear,
    can_merge,
    single_product,
)
from services.rank_worker.model.fast_path.unknown_form import UnknownForm

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_MODULES = {*_PROJECTIONS, "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}


@dataclasses.dataclass(frozen=True, slots=True)
class HeadForm:
    """The modules of an attention whose keys and values have the same number of heads and widths.

    Several new tokens per row are computed as one is.
    """

    module: Any
    """Has q_proj, k_proj, v_proj and o_proj, and where it normalizes heads q_norm and k_norm."""
    shape: AttentionShape
    scale: float
    """Factor of the scores."""
    rotation: Rotation | None
    """Of queries and keys; None: they are not rotated."""
    dtype: mx.Dtype
    """Of queries, keys and values."""
    is_expanded: ClassVar[bool] = False
    """See `AttentionForm`."""

    @property
    def has_one_norm(self) -> bool:
        """Whether one operation can normalize queries and keys."""
        module = self.module
        return not self.shape.normalizes or module.q_norm.eps == module.k_norm.eps

    @property
    def can_concatenate(self) -> bool:
        """See `AttentionForm`. Without kernels queries and keys are prepared together."""
        return self.has_one_norm

    def open(self, kernels: Kernels | None, *, on_cpu: bool) -> "HeadAttention":
        """Merge the weights; arguments as those of `LayerStack`. Waits for the device."""
        return HeadAttention(self, kernels, on_cpu=on_cpu)


def read_heads(
    attention: Any, keys: BlockPart, values: BlockPart, rotations: list[Rotation]
) -> HeadForm | None:
    """Recognize an attention by its modules and shapes.

    Args:
        attention: mlx-lm's module.
        keys: shape of its keys.
        values: shape of its values.
        rotations: of earlier layers; a new one is added.

    Returns:
        Its form; None: it has other modules.

    Raises:
        UnknownForm: it has these modules, but they are built differently.
    """
    names = set(attention.children()) - {"rope"}
    normalizes = names == _MODULES | _HEAD_NORMS
    if names != _MODULES and not normalizes:
        return None
    if not is_linear_like(attention.o_proj) or not can_merge(
        [attention[name] for name in _PROJECTIONS]
    ):
        raise UnknownForm("queries, keys and values are projected by matrices of several kinds")
    if (keys.heads, keys.dim) != (values.heads, values.dim):
        raise UnknownForm(f"heads of keys and values have {keys.dim} and {values.dim} numbers")
    if normalizes:
        for name in sorted(_HEAD_NORMS):
            if as_rms_norm(attention[name], name).weight.shape != (keys.dim,):
                raise UnknownForm(f"{name} does not normalize heads one by one")
    rotation = share_rotation(attention.get("rope"), keys.dim, rotations)
    shape = AttentionShape(
        query_heads=int(attention.q_proj.weight.shape[0]) // keys.dim,
        kv_heads=keys.heads,
        head_dim=keys.dim,
        rotated=rotation.width if rotation is not None else 0,
        is_traditional=rotation is not None and rotation.is_traditional,
        normalizes=normalizes,
    )
    return HeadForm(attention, shape, float(attention.scale), rotation, keys.dtype)


class HeadAttention:
    """Computes such an attention."""

    def __init__(self, form: HeadForm, kernels: Kernels | None, *, on_cpu: bool) -> None:
        """Merge the weights; arguments as those of `LayerStack`. Waits for the device."""
        self._form = form
        self._kernels = kernels
        module, shape = form.module, form.shape
        few_rows = kernels.few_rows if kernels is not None else None
        self._qkv = MergedLinear([module[name] for name in _PROJECTIONS], few_rows)
        self._output = single_product(module.o_proj, few_rows)
        epsilons = [0.0, 0.0]
        norms = [mx.zeros((1,), dtype=form.dtype)] * 2
        if shape.normalizes:
            norms = [module.q_norm.weight, module.k_norm.weight]
            epsilons = [module.q_norm.eps, module.k_norm.eps]
        self._weights = AttentionWeights(norms[0], norms[1], device_numbers(form.scale, *epsilons))
        self._head_norm = self._merge_head_norms() if shape.normalizes else None
        self._prepares_together = on_cpu and form.has_one_norm
        mx.eval(self._head_norm)

    def compile_products(self, *, invariant: bool) -> None:
        """See `Attention`."""
        self._qkv.compile(invariant=invariant)
        self._output.compile(invariant=invariant)

    @property
    def has_plain_matrices(self) -> bool:
        """See `LayerStack`."""
        return self._output.can_be_invariant

    @property
    def is_divided(self) -> bool:
        """See `Attention`."""
        return self._output.is_divided

    def _merge_head_norms(self) -> mx.array:
        """Return the norms' weights of all heads of queries and keys, [heads, 1, head_dim]."""
        shape, weights = self._form.shape, self._weights
        rows = [(weights.query_norm, shape.query_heads), (weights.key_norm, shape.kv_heads)]
        return mx.concatenate(
            [mx.broadcast_to(one, (heads, 1, shape.head_dim)) for one, heads in rows]
        )

    def attend(
        self, normalized: mx.array, cache: RowLayer | RowArrays, tokens: NewTokens
    ) -> mx.array:
        """See `Attention`."""
        qkv = self._qkv(normalized, invariant=tokens.invariant)
        table = tokens.tables.get(id(self._form.rotation))
        if tokens.places is not None:
            assert self._kernels is not None
            stored = cache.arrays if isinstance(cache, RowLayer) else cache
            of_tokens, of_prompts = self._kernels.head_attention, self._kernels.prompt_attention
            kernels = of_tokens if tokens.places.blocks is None else of_prompts
            assert kernels is not None
            attended = kernels.attend(
                self._form.shape, self._weights, qkv, stored, tokens.places, table
            )
        else:
            assert isinstance(cache, RowLayer)
            attended = self._attend_plainly(qkv, cache, tokens, table)
        return multiply_last(self._output, attended, tokens)

    def _attend_plainly(
        self, qkv: mx.array, cache: RowLayer, tokens: NewTokens, table: mx.array | None
    ) -> mx.array:
        form = self._form
        queries, keys, values = self._prepare(qkv, tokens, table)
        if tokens.are_concatenated:
            return self._attend_each(queries, keys, values, cache)
        fetched = cache.update_and_fetch(keys, values)
        attend = functools.partial(scaled_dot_product_attention, cache=cache, scale=form.scale)
        attended: mx.array
        if tokens.invariant:
            attended = attend_row_by_row(attend, [queries], fetched, cache)
        else:
            attended = attend(queries, *fetched, mask=tokens.mask)
        return attended.swapaxes(1, 2).reshape(tokens.rows * tokens.count, -1)

    def _attend_each(
        self, queries: mx.array, keys: mx.array, values: mx.array, cache: RowLayer
    ) -> mx.array:
        """Attend chunk by chunk, see `ConcatenatedView`."""
        view, attended = cache.view, []
        assert isinstance(view, ConcatenatedView)
        fetched = cache.update_and_fetch_each(keys, values)
        for part, own, its in zip(view.parts, view.split(queries), fetched, strict=True):
            mask: Any = part.mask(own.shape[2], None, return_array=False)
            result: mx.array = scaled_dot_product_attention(
                own, *its, cache=cache, scale=self._form.scale, mask=mask
            )
            attended.append(result.swapaxes(1, 2))
        joined = mx.concatenate(attended, axis=1)
        return joined.reshape(joined.shape[1], -1)

    def _prepare(self, qkv: mx.array, tokens: NewTokens, table: mx.array | None) -> list[mx.array]:
        """Return queries, keys and values, [B, heads, L, head_dim], normalized and rotated."""
        of_heads = self._kernels.head_attention if self._kernels is not None else None
        if of_heads is not None and of_heads.can_prepare:
            return of_heads.prepare(self._form.shape, self._weights, qkv, tokens.rows, table)
        shape = tokens.rows, tokens.count, -1, self._form.shape.head_dim
        heads = qkv.reshape(shape).swapaxes(1, 2)
        if tokens.are_concatenated or self._prepares_together:
            return self._prepare_together(heads, table)
        return self._prepare_singly(heads, tokens)

    def _prepare_singly(self, heads: mx.array, tokens: NewTokens) -> list[mx.array]:
        """Split queries, keys and values; normalize and rotate them as mlx-lm does.

        On a GPU each norm and each rotation is one operation.
        """
        shape, module = self._form.shape, self._form.module
        borders = [shape.query_heads, shape.query_heads + shape.kv_heads]
        queries, keys, values = mx.split(heads, borders, axis=1)
        if shape.normalizes:
            queries, keys = module.q_norm(queries), module.k_norm(keys)
        if self._form.rotation is not None:
            queries = module.rope(queries, offset=tokens.offset)
            keys = module.rope(keys, offset=tokens.offset)
        return [queries, keys, values]

    def _prepare_together(self, heads: mx.array, table: mx.array | None) -> list[mx.array]:
        """Normalize and rotate queries and keys together, then split them.

        On a CPU norms and rotations are a dozen operations each.
        """
        shape = self._form.shape
        both, values = mx.split(heads, [shape.query_heads + shape.kv_heads], axis=1)
        if self._head_norm is not None:
            epsilon = self._form.module.q_norm.eps
            both = mx.fast.rms_norm(both, None, epsilon) * self._head_norm
        if self._form.rotation is not None and table is not None:
            both = self._form.rotation.rotate(both, table)
        return [*mx.split(both, [shape.query_heads], axis=1), values]
