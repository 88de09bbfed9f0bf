"""A family's own layers whose decodes attend by kernels, which write the rows.

mlx-lm's code stays as it is. In a decode it gets caches that remember the new keys and values, and
its function for attention, which every family calls by one name, starts the kernel. B is the number
of new tokens, each of which is a row of the forward.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx import nn

from services.rank_worker.kv_cache.rows.block_layout import BlockPart
from services.rank_worker.kv_cache.rows.row_layers import RowLayer
from services.rank_worker.kv_cache.rows.row_views import InPlaceView
from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.model.fast_path.any_form.merged_products import (
    Matrices,
    MergedProducts,
    matrices_noted,
)
from services.rank_worker.model.fast_path.comparison import PlainForward
from services.rank_worker.model.fast_path.compiled_forwards import CompiledForwards, RowArrays
from services.rank_worker.model.fast_path.kernels.attention.head_kernels import (
    AttentionShape,
    AttentionWeights,
)
from services.rank_worker.model.fast_path.kernels.attention.row_places import RowPlaces
from services.rank_worker.model.fast_path.kernels.dialects import device_numbers
from services.rank_worker.model.fast_path.kernels.kernels import Kernels
from services.rank_worker.model.fast_path.unknown_form import UnknownForm
from services.rank_worker.model.forward import Observe

_ATTENTION = "scaled_dot_product_attention"
"""Name of mlx-lm's function for attention in the modules of its families."""
_PROBED_TOKENS = 3

Attend = Callable[[mx.array, mx.array, mx.array, float], mx.array]
"""Called with new queries, keys and values, [B, heads, 1, head_dim], and the scores' factor;
returns an array like the queries."""


@dataclasses.dataclass(frozen=True, slots=True)
class FullAttention:
    """A layer's attention to all earlier tokens, of a factor of the scores and a softmax alone."""

    shape: AttentionShape
    scale: float
    """Factor of the scores."""


@dataclasses.dataclass(frozen=True, slots=True)
class FamilyForm:
    """How a model of any form attends and multiplies."""

    attentions: list[FullAttention]
    """Of each layer."""
    matrices: list[Matrices]
    """Those that are called with the same array."""


class FamilyLayers:
    """A model without its head: token ids -> hidden states after the last norm."""

    has_kernels = True
    """Decodes write rows in place, see `InPlaceView`."""
    prefills_in_place = can_concatenate = False
    """mlx-lm's code reads one chunk of a prompt at a time, see `LayerStack`."""

    def __init__(
        self,
        plain: PlainForward,
        inner: nn.Module,
        form: FamilyForm,
        kernels: Kernels,
        counter: ExpertCounter | None = None,
    ) -> None:
        """Merge matrices with one input; waits for the device.

        Args:
            plain: mlx-lm's forward.
            inner: mlx-lm's model without its head, with its weights in memory.
            form: the result of `read_family_form`.
            kernels: of the device.
            counter: notes the calls of layers of experts; None: they are not counted.
        """
        self._plain = plain
        self._modules = _attention_modules(inner)
        self.form = form
        self._kernels = kernels
        self._weights = {one: _weights(one) for one in set(form.attentions)}
        self.products = MergedProducts(form.matrices, kernels.few_rows)
        self.products.compile()
        query_heads = max(one.shape.query_heads for one in form.attentions)
        self._compiled = CompiledForwards(self._build_forward, query_heads, counter)
        self.observe: Observe | None = None
        """Set while a step is measured: mlx-lm's modules are observed themselves then."""

    def __call__(self, tokens: mx.array, caches: Sequence[RowLayer]) -> mx.array:
        """Build a forward: int32 [rows, count], and a cache per layer -> [rows, count, dim]."""
        view = caches[0].view
        if not isinstance(view, InPlaceView):
            return self._plain(tokens, caches)
        is_measured = self.observe is not None
        hidden = self._compiled(tokens.reshape(-1), view, caches, is_measured=is_measured)
        return hidden.reshape(*tokens.shape, -1)

    def attend(
        self,
        attention: FullAttention,
        new: Sequence[mx.array],
        rows: RowArrays,
        places: RowPlaces,
    ) -> mx.array:
        """Write new keys and values to the rows of a layer, and attend.

        Args:
            attention: of the layer.
            new: queries, keys and values, [B, heads, 1, head_dim] each.
            rows: of the layer.
            places: where the new tokens are.

        Returns:
            Like the queries.
        """
        qkv = mx.concatenate(list(new), axis=1).reshape(len(new[0]), -1)
        weights = self._weights[attention]
        attended = self._kernels.head_attention.attend(
            attention.shape, weights, qkv, rows, places, None
        )
        return attended.reshape(new[0].shape)

    def _build_forward(
        self, tokens: mx.array, places: RowPlaces, rows: Sequence[RowArrays]
    ) -> mx.array:
        """Build a decode whose kernels write the rows; see `BuildForward`."""

        def attend_in(attention: FullAttention, its_rows: RowArrays) -> Attend:
            return lambda queries, keys, values, _scale: self.attend(
                attention, [queries, keys, values], its_rows, places
            )

        pairs = zip(self.form.attentions, rows, strict=True)
        caches = [_NewTokens(places.lengths, attend_in(*pair)) for pair in pairs]
        with _attention_asks_caches(self._modules), self.products.used():
            hidden = self._plain(tokens[:, None], caches)
        return hidden.reshape(tokens.shape[0], -1)


def read_family_form(
    plain: PlainForward, inner: nn.Module, parts: list[list[BlockPart]]
) -> FamilyForm:
    """Find out how a model attends and multiplies, by a decode that is built and never computed.

    Args:
        plain: mlx-lm's forward.
        inner: mlx-lm's model without its head.
        parts: shapes of each layer's keys and values, as `ModelShape.layers` returns them.

    Raises:
        UnknownForm: a layer attends in another way than `FullAttention` says.
    """
    if getattr(inner, "pipeline_size", 1) > 1:
        raise UnknownForm("the model is a part of a pipeline")
    found: dict[int, FullAttention] = {}

    def note_in(number: int) -> Attend:
        def note(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
            if number in found:
                raise UnknownForm(f"layer {number} attends twice")
            found[number] = _read_attention(number, [queries, keys, values], scale, parts[number])
            return queries

        return note

    lengths = mx.zeros((_PROBED_TOKENS,), dtype=mx.int32)
    caches = [_NewTokens(lengths, note_in(number)) for number in range(len(parts))]
    tokens = mx.zeros((_PROBED_TOKENS, 1), dtype=mx.int32)
    try:
        with _attention_asks_caches(_attention_modules(inner)), matrices_noted(inner) as matrices:
            plain(tokens, caches)
    except UnknownForm:
        raise
    except Exception as error:  # the model's code ran
        raise UnknownForm(f"their code needs other caches ({error!r})") from error
    if len(found) < len(parts):
        missing = min(set(range(len(parts))) - set(found))
        raise UnknownForm(f"layer {missing} attends in a way of its own")
    return FamilyForm([found[number] for number in range(len(parts))], matrices)


class _NewTokens:
    """One layer's cache in a decode whose kernels write the rows, for mlx-lm's code."""

    def __init__(self, lengths: mx.array, attend: Attend) -> None:
        self.offset = lengths
        """Position of each new token, int32 [B]; the model's rotary embedding reads it."""
        self._attend = attend
        self._new: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Remember new keys and values, [B, kv_heads, 1, head_dim], and return them."""
        self._new = keys, values
        return keys, values

    def make_mask(
        self,
        N: int,  # noqa: N803  (mlx-lm passes it by this name)
        return_array: bool = False,
        window_size: int | None = None,
    ) -> None:
        """Return no mask: each token attends to all before it.

        Raises:
            UnknownForm: to some of them only.
        """
        del N, return_array
        if window_size is not None:
            raise UnknownForm("layers attend to some tokens only")

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, *others: Any
    ) -> mx.array:
        """Attend to the row, to which the new keys and values belong."""
        is_own = self._new is not None and keys is self._new[0] and values is self._new[1]
        if not is_own or any(one is not None for one in others):
            raise UnknownForm("a layer attends in a way of its own")
        return self._attend(queries, keys, values, scale)


@contextlib.contextmanager
def _attention_asks_caches(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Have mlx-lm's function for attention ask caches of decodes in place."""
    originals = [getattr(one, _ATTENTION) for one in modules]

    def attend(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if not isinstance(cache, _NewTokens):
            raise UnknownForm("a layer attends without a cache of its own")
        return cache.attend(queries, keys, values, scale, mask, sinks)

    for module in modules:
        setattr(module, _ATTENTION, attend)
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            setattr(module, _ATTENTION, original)


def _attention_modules(inner: nn.Module) -> list[ModuleType]:
    """Return Python's modules in which classes of a model call mlx-lm's function for attention."""
    classes = {kind for module in inner.modules() for kind in type(module).__mro__}
    found = {one.__module__: sys.modules.get(one.__module__) for one in classes}
    named = [found[name] for name in sorted(found)]
    return [one for one in named if one is not None and hasattr(one, _ATTENTION)]


def _read_attention(
    number: int, new: Sequence[mx.array], scale: float, parts: Sequence[BlockPart]
) -> FullAttention:
    """Return a layer's attention, given new queries, keys and values."""
    queries, *stored = new
    for array, part in zip(stored, parts, strict=True):
        expected = (_PROBED_TOKENS, part.heads, 1, part.dim)
        if array.shape != expected or {array.dtype, queries.dtype} != {part.dtype}:
            raise UnknownForm(f"layer {number} has keys or values of an unknown shape")
    keys, values = parts
    if (keys.heads, keys.dim) != (values.heads, values.dim) or queries.shape[3] != keys.dim:
        raise UnknownForm(f"layer {number} has heads of different widths")
    shape = AttentionShape(
        query_heads=queries.shape[1],
        kv_heads=keys.heads,
        head_dim=keys.dim,
        rotated=0,
        is_traditional=False,
        normalizes=False,
    )
    return FullAttention(shape, float(scale))


def _weights(attention: FullAttention) -> AttentionWeights:
    unused = mx.zeros((1,))
    mx.eval(unused)
    return AttentionWeights(unused, unused, device_numbers(attention.scale, 0.0, 0.0))
