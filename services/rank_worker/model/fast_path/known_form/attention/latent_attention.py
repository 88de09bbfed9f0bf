"""Attention to latents: one short vector per token, of which all heads make keys and values.

One new token per row is computed in the space of latents, and its queries are multiplied into that
space; for several, keys and values are made of the latents, as mlx-lm does. C is the width of
latents, R that of the rotated parts of keys and queries.

B is the number of rows, L the tokens per row.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.row_layers import RowLayer
from services.rank_worker.model.fast_path.compiled_forwards import RowArrays
from services.rank_worker.model.fast_path.kernels.attention.latent_kernels import (
    LatentShape,
    LatentWeights,
    NewLatents,
)
from services.rank_worker.model.fast_path.kernels.dialects import device_numbers
from services.rank_worker.model.fast_path.kernels.kernels import Kernels
from services.rank_worker.model.fast_path.known_form.attention.head_matrices import (
    HeadMatrices,
    head_shape,
)
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
    Product,
    can_merge,
    single_product,
)
from services.rank_worker.model.fast_path.unknown_form import UnknownForm

_MODULES = {"kv_a_proj_with_mqa", "kv_a_layernorm", "embed_q", "unembed_out", "o_proj", "rope"}
_WHOLE_QUERIES = {"q_proj"}
_NARROW_QUERIES = {"q_a_proj", "q_a_layernorm", "q_b_proj"}
"""Queries are projected in two steps with a norm between them."""


@dataclasses.dataclass(frozen=True, slots=True)
class LatentForm:
    """The modules of an attention to latents."""

    module: Any
    """Has `_MODULES`, and q_proj, or q_a_proj, q_a_layernorm and q_b_proj."""
    shape: LatentShape
    scale: float
    """Factor of the scores."""
    rotation: Rotation
    """Of the rotated parts."""
    is_narrow: bool
    """Queries are projected in two steps."""
    is_expanded: ClassVar[bool] = True
    """See `AttentionForm`."""
    can_concatenate: ClassVar[bool] = False
    """See `AttentionForm`."""

    def open(self, kernels: Kernels | None, *, on_cpu: bool) -> "LatentAttention":
        """Merge the weights; arguments as those of `LayerStack`. Waits for the device."""
        return LatentAttention(self, kernels, on_cpu=on_cpu)


def read_latents(
    attention: Any, latents: BlockPart, keys: BlockPart, rotations: list[Rotation]
) -> LatentForm | None:
    """Recognize an attention by its modules and shapes.

    Args:
        attention: mlx-lm's module, whole or with some of the heads.
        latents: shape of its latents, which mlx-lm keeps as keys.
        keys: shape of the rotated parts of keys, which it keeps as values.
        rotations: of earlier layers; a new one is added.

    Returns:
        Its form; None: it has other modules.

    Raises:
        UnknownForm: it has these modules, but they are built differently.
    """
    names = set(attention.children())
    is_narrow = names == _MODULES | _NARROW_QUERIES
    if not is_narrow and names != _MODULES | _WHOLE_QUERIES:
        return None
    matrices = {one for one in names if one.endswith(("proj", "mqa"))}
    if not all(is_linear_like(attention[one]) for one in matrices):
        raise UnknownForm("a projection is no matrix")
    heads = int(attention.embed_q.weight.shape[0])
    query = attention.q_b_proj if is_narrow else attention.q_proj
    unrotated = int(query.weight.shape[0]) // heads - keys.dim
    fits = (
        latents.heads == keys.heads == 1
        and len(attention.kv_a_proj_with_mqa.weight) == latents.dim + keys.dim
        and len(query.weight) == heads * (unrotated + keys.dim)
        and head_shape(attention.embed_q) == (heads, latents.dim, unrotated)
        and head_shape(attention.unembed_out)[::2] == (heads, latents.dim)
    )
    norms = [("kv_a_layernorm", latents.dim)]
    if is_narrow:
        norms.append(("q_a_layernorm", len(attention.q_a_proj.weight)))
    if not fits or any(
        as_rms_norm(attention[name], name).weight.shape != (width,) for name, width in norms
    ):
        raise UnknownForm("the parts of latent attention do not fit each other")
    rotation = share_rotation(attention.rope, keys.dim, rotations)
    if rotation is None or rotation.width != keys.dim:
        raise UnknownForm("the rotated parts of keys are not rotated as a whole")
    shape = LatentShape(heads, latents.dim, keys.dim, unrotated, rotation.is_traditional)
    return LatentForm(attention, shape, float(attention.scale), rotation, is_narrow)


class LatentAttention:
    """Computes such an attention."""

    def __init__(self, form: LatentForm, kernels: Kernels | None, *, on_cpu: bool) -> None:
        """Merge the weights; arguments as those of `LayerStack`. Waits for the device."""
        self._form = form
        self._kernels = kernels
        self._on_cpu = on_cpu
        module = form.module
        few_rows = kernels.few_rows if kernels is not None else None
        first = [module.q_a_proj if form.is_narrow else module.q_proj, module.kv_a_proj_with_mqa]
        self._projections: list[Product] = [single_product(one, few_rows) for one in first]
        widths = [len(one.weight) for one in first]
        self._query_width = len(module.q_b_proj.weight) if form.is_narrow else widths[0]
        """Numbers of a row with new queries at its beginning."""
        if can_merge(first):
            self._projections = [MergedLinear(first, few_rows)]
            self._query_width = self._query_width if form.is_narrow else sum(widths)
        self._wide_query = single_product(module.q_b_proj, few_rows) if form.is_narrow else None
        products = kernels.latent_attention.products if kernels is not None else None
        self._absorb = HeadMatrices(module.embed_q, products)
        self._unembed = HeadMatrices(module.unembed_out, products)
        self._output = single_product(module.o_proj, few_rows)
        norm = module.kv_a_layernorm
        self._weights = LatentWeights(norm.weight, device_numbers(form.scale, norm.eps))
        self._query_epsilon = device_numbers(module.q_a_layernorm.eps if form.is_narrow else 0.0)

    @property
    def _products(self) -> list[Product]:
        optional = [] if self._wide_query is None else [self._wide_query]
        return [*self._projections, *optional, self._output]

    def compile_products(self, *, invariant: bool) -> None:
        """See `Attention`."""
        for one in self._products:
            one.compile(invariant=invariant)
        shape = self._form.shape
        self._absorb.compile(self._query_width, shape.head)
        self._unembed.compile(shape.query_heads * shape.latent, shape.latent)

    @property
    def has_plain_matrices(self) -> bool:
        """See `LayerStack`."""
        return all(one.can_be_invariant for one in self._products)

    @property
    def is_divided(self) -> bool:
        """See `Attention`."""
        return self._output.is_divided

    def attend(
        self, normalized: mx.array, cache: RowLayer | RowArrays, tokens: NewTokens
    ) -> mx.array:
        """See `Attention`."""
        table = tokens.tables[id(self._form.rotation)]
        projected = [one(normalized, invariant=tokens.invariant) for one in self._projections]
        if tokens.places is not None:
            pair = cache.arrays if isinstance(cache, RowLayer) else cache
            attended = self._attend_in_place(projected, pair, tokens, table)
        else:
            assert isinstance(cache, RowLayer)
            attended = self._attend_plainly(projected, cache, tokens, table)
        return multiply_last(self._output, attended, tokens)

    def _attend_in_place(
        self,
        projected: Sequence[mx.array],
        pair: Sequence[mx.array],
        tokens: NewTokens,
        table: mx.array,
    ) -> mx.array:
        """Build a decode whose kernel writes the rows.

        Args:
            projected: results of `_projections`, [B, any] each.
            pair: latents and rotated keys of all rows.
            tokens: of this forward.
            table: of the rotation.

        Returns:
            [B, heads * value numbers].
        """
        assert self._kernels is not None
        assert tokens.places is not None
        kernels, shape = self._kernels.latent_attention, self._form.shape
        queries = projected[0]
        if self._wide_query is not None:
            norm = self._form.module.q_a_layernorm
            narrow = kernels.normalize_part(queries, norm.weight, self._query_epsilon)
            queries = self._wide_query(narrow, invariant=tokens.invariant)
        absorbed = self._absorb.multiply_rows(queries, shape.head)
        new = NewLatents(queries, absorbed, projected[-1])
        attended = kernels.attend(shape, self._weights, new, pair[0], pair[1], tokens.places, table)
        return self._unembed.multiply_rows(attended, shape.latent).reshape(tokens.rows, -1)

    def _attend_plainly(
        self,
        projected: Sequence[mx.array],
        cache: RowLayer,
        tokens: NewTokens,
        table: mx.array,
    ) -> mx.array:
        """Build what mlx-lm computes; arguments and result as those of `_attend_in_place`."""
        form, shape, module = self._form, self._form.shape, self._form.module
        rows, count = tokens.rows, tokens.count
        parts = projected[0]
        if len(projected) == 2:
            first, new = projected
        else:
            first, new = mx.split(parts, [parts.shape[1] - shape.latent - shape.rotated], axis=-1)
        if self._wide_query is not None:
            first = self._wide_query(module.q_a_layernorm(first), invariant=tokens.invariant)
        heads = first.reshape(rows, count, shape.query_heads, shape.head).swapaxes(1, 2)
        unrotated, rotated = mx.split(heads, [shape.plain], axis=-1)
        new = new.reshape(rows, 1, count, shape.latent + shape.rotated)
        latent, key = mx.split(new, [shape.latent], axis=-1)
        rotated, key = self._rotate(rotated, key, tokens, table)
        fetched = cache.update_and_fetch(module.kv_a_layernorm(latent), key)
        is_absorbed = count == 1
        queries = [self._absorb(unrotated) if is_absorbed else unrotated, rotated * form.scale]
        attend: Callable[..., mx.array] = functools.partial(
            self._attend, cache, is_absorbed=is_absorbed
        )
        if tokens.invariant:
            attended = attend_row_by_row(attend, queries, fetched, cache)
        else:
            attended = attend(*queries, *fetched, mask=tokens.mask)
        if is_absorbed:
            attended = self._unembed(attended)
        return attended.swapaxes(1, 2).reshape(rows * count, -1)

    def _rotate(
        self, queries: mx.array, key: mx.array, tokens: NewTokens, table: mx.array
    ) -> Sequence[mx.array]:
        """Rotate parts [B, heads, L, R] of the queries and [B, 1, L, R] of the new keys."""
        if not self._on_cpu:
            rope = self._form.module.rope
            return [rope(one, offset=tokens.offset) for one in (queries, key)]
        # On a CPU a rotation is a dozen operations.
        both = self._form.rotation.rotate(mx.concatenate([queries, key], axis=1), table)
        rotated, rotated_key = mx.split(both, [queries.shape[1]], axis=1)
        return rotated, rotated_key

    def _attend(
        self,
        cache: RowLayer,
        queries: mx.array,
        rotated: mx.array,
        latents: mx.array,
        rotated_keys: mx.array,
        *,
        mask: mx.array | None,
        is_absorbed: bool,
    ) -> mx.array:
        """Attend to latents if queries are absorbed, else to the keys and values made of them.

        Args:
            cache: of the layer.
            queries: [B, heads, L, C] if absorbed, else their unrotated parts.
            rotated: their rotated parts, multiplied with the scale, [B, heads, L, R].
            latents: [B, 1, tokens, C].
            rotated_keys: [B, 1, tokens, R].
            mask: see `NewTokens`.
            is_absorbed: whether they are.

        Returns:
            [B, heads, L, C] if absorbed, else values.
        """
        module = self._form.module
        scores = rotated @ rotated_keys.swapaxes(-1, -2)
        if mask is not None:
            scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
        keys = values = latents
        if not is_absorbed:
            keys, values = module.embed_q(latents, transpose=False), module.unembed_out(latents)
        attended: mx.array = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self._form.scale, mask=scores
        )
        return attended
