"""The forward of a stack of decoder layers of known form.

B is the number of rows, L the tokens per row.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from services.rank_worker.kv_cache.rows.row_layers import RowLayer
from services.rank_worker.kv_cache.rows.row_views import ConcatenatedView, InPlaceView
from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.model.fast_path.compiled_forwards import CompiledForwards, RowArrays
from services.rank_worker.model.fast_path.kernels.attention.row_places import RowPlaces
from services.rank_worker.model.fast_path.kernels.dialects import device_numbers
from services.rank_worker.model.fast_path.kernels.kernels import Kernels, Shape
from services.rank_worker.model.fast_path.kernels.peer_sums import PeerSums
from services.rank_worker.model.fast_path.known_form.attention.interface import NewTokens
from services.rank_worker.model.fast_path.known_form.decoder_layer import DecoderLayer
from services.rank_worker.model.fast_path.known_form.forms import StackForm
from services.rank_worker.model.fast_path.known_form.rotation import Rotation
from services.rank_worker.model.fast_path.routed_block import RoutedBlock, find_routed
from services.rank_worker.model.forward import Observe

Pair = tuple[mx.array, mx.array]
"""Hidden states, and the same normalized, [B * L, dim] each."""


class LayerStack:
    """A model without its head: token ids -> hidden states after the last norm."""

    def __init__(
        self,
        form: StackForm,
        kernels: Kernels | None,
        counter: ExpertCounter | None = None,
        *,
        on_cpu: bool,
        batch_invariant: bool,
    ) -> None:
        """Merge the weights of all layers; waits for the device.

        Args:
            form: the model's modules, with their weights in memory.
            kernels: of the device; None: MLX's operations are used.
            counter: notes the calls of layers of experts; None: they are not counted.
            on_cpu: whether the model runs on the CPU.
            batch_invariant: what a decode computes for a row must not depend on the other rows.
        """
        self._form = form
        self._batch_invariant = batch_invariant
        self._kernels = kernels
        self._layers: list[DecoderLayer] = []
        for one in form.layers:
            self._layers.append(DecoderLayer(one, kernels, on_cpu=on_cpu))
            # The merged weights replace those that the modules have held.
            mx.clear_cache()
        self._following = [*(one.input_norm for one in form.layers[1:]), form.norm]
        norms = [*(one.mlp_norm for one in form.layers), *self._following]
        self._epsilons = {id(norm): device_numbers(norm.eps) for norm in norms}
        attentions = [one.attention for one in form.layers]
        self._rotations: dict[int, Rotation] = {
            id(one.rotation): one.rotation for one in attentions if one.rotation is not None
        }
        self._wants_mask_array = any(one.is_expanded for one in attentions)
        query_heads = max(one.shape.query_heads for one in attentions)
        self._compiled = CompiledForwards(self._build_forward, query_heads, counter)
        self.sums: PeerSums | None = None
        """Sums over ranks in decodes; None: collectives do."""
        self.observe: Observe | None = None
        """Calls the parts of the layers while a step is measured; None: nothing is measured."""

    def compile_products(self) -> None:
        """Have kernels of products compiled for the shapes of the weights; waits for the device.

        Layers usually have matrices of the same shapes; others are compiled when they first run.
        """
        self._layers[0].compile_products(invariant=self._batch_invariant)

    @property
    def has_kernels(self) -> bool:
        """Whether decodes write rows in place, see `InPlaceView`."""
        return self._kernels is not None

    @property
    def prefills_in_place(self) -> bool:
        """Whether kernels also write the rows of prompts, see `InPlaceView`."""
        return self._kernels is not None and self._kernels.prompt_attention is not None

    @property
    def has_sums_over_ranks(self) -> bool:
        """Whether a layer ends its attention, MLP or experts with a sum over ranks."""
        blocks = [find_routed(one.form.mlp) for one in self._layers]
        return any(one is not None and not one.is_whole for one in blocks) or any(
            one.attention_is_divided or one.mlp_is_divided for one in self._layers
        )

    @property
    def can_concatenate(self) -> bool:
        """Whether chunks of several rows can be computed side by side, see `ConcatenatedView`."""
        return all(one.attention.can_concatenate for one in self._form.layers)

    @property
    def shapes(self) -> list[Shape]:
        """What each layer's attention is compiled for."""
        return [one.attention.shape for one in self._form.layers]

    @property
    def dim(self) -> int:
        """Width of hidden states."""
        return int(self._form.norm.weight.shape[0])

    @property
    def has_plain_matrices(self) -> bool:
        """Whether all products are of whole matrices, or of parts that are only summed."""
        return all(one.has_plain_matrices for one in self._layers)

    def __call__(self, tokens: mx.array, caches: Sequence[RowLayer]) -> mx.array:
        """Build a forward.

        Args:
            tokens: int32 [B, L].
            caches: one per layer.

        Returns:
            [B, L, dim].
        """
        rows, count = tokens.shape
        view, flat = caches[0].view, tokens.reshape(-1)
        if isinstance(view, InPlaceView):
            hidden = self._compiled(flat, view, caches, is_measured=self.observe is not None)
        else:
            hidden = self._run(flat, caches, self._new_tokens(caches[0], rows, count))
        return hidden.reshape(rows, count, -1)

    def _build_forward(
        self, tokens: mx.array, places: RowPlaces, rows: Sequence[RowArrays]
    ) -> mx.array:
        """Build a forward whose kernels write the rows; see `BuildForward`."""
        count = tokens.shape[0]
        shape = (count, 1) if places.blocks is None else (1, count)
        return self._run(tokens, rows, self._tokens_in_place(places, *shape))

    def _run(
        self, tokens: mx.array, caches: Sequence[RowLayer] | Sequence[RowArrays], new: NewTokens
    ) -> mx.array:
        hidden: mx.array = self._form.embedding(tokens)
        normalized: mx.array = self._form.layers[0].input_norm(hidden)
        decodes = new.places is not None and new.places.blocks is None
        if decodes and self._sums_in_peer_memory(hidden):
            new = dataclasses.replace(new, leaves_summand=True)
        for place, (layer, norm) in enumerate(zip(self._layers, self._following, strict=True)):
            cache = caches[place]
            hidden, normalized = self._run_layer(layer, cache, new, hidden, normalized, norm)
        return normalized

    def _run_layer(
        self,
        layer: DecoderLayer,
        cache: RowLayer | RowArrays,
        new: NewTokens,
        hidden: mx.array,
        normalized: mx.array,
        norm: Any,
    ) -> Pair:
        module, mlp_norm = layer.form.attention.module, layer.form.mlp_norm
        change = self._part(module, layer.attend, normalized, cache, new)
        is_summand = new.leaves_summand and layer.attention_is_divided
        hidden, normalized = self._add_norm(hidden, change, mlp_norm, is_summand=is_summand)
        return self._run_rest(layer, new, hidden, normalized, norm)

    def _run_rest(
        self, layer: DecoderLayer, new: NewTokens, hidden: mx.array, normalized: mx.array, norm: Any
    ) -> Pair:
        """Build a layer behind its attention and the norm there, and the following norm."""
        form, is_summand = layer.form, False
        routed = find_routed(form.mlp)
        if form.has_gated_mlp:
            change = self._part(form.mlp, layer.transform, normalized, new)
            is_summand = new.leaves_summand and layer.mlp_is_divided
        elif routed is not None and self._adds_experts(routed, normalized, new):
            epsilon = self._epsilons[id(norm)]
            return routed.add_norm(hidden, normalized, norm.weight, epsilon, self.sums)
        elif routed is not None:
            change = form.mlp(normalized)
        else:
            shaped = normalized.reshape(new.rows, new.count, -1)
            change = form.mlp(shaped).reshape(normalized.shape)
        return self._add_norm(hidden, change, norm, is_summand=is_summand)

    def _adds_experts(self, routed: RoutedBlock, x: mx.array, new: NewTokens) -> bool:
        """Tell whether a block's result is added and normalized in the same operation."""
        if not (routed.is_whole or new.leaves_summand):
            return False
        return routed.takes(x) and self.has_kernels and self.observe is None

    def _sums_in_peer_memory(self, hidden: mx.array) -> bool:
        """Tell whether the norms of a decode sum over ranks what these have computed."""
        return self.sums is not None and self.sums.takes(hidden) and self.observe is None

    def without_layers(self, tokens: mx.array) -> mx.array:
        """Return what the forward would be if no layer changed its input, for the proof."""
        normalized: mx.array = self._form.norm(self._form.embedding(tokens))
        return normalized

    def is_expanded(self, number: int) -> bool:
        """Tell whether a layer computes several new tokens per row in another way than one."""
        return self._layers[number].form.attention.is_expanded

    def run_layer(self, number: int, hidden: mx.array, cache: RowLayer) -> mx.array:
        """Build one layer, for the proof.

        Args:
            number: of the layer.
            hidden: its input, [B, 1, dim].
            cache: its rows.

        Returns:
            Its output, [B, 1, dim].
        """
        layer, new = self._layers[number], self._new_tokens(cache, *hidden.shape[:2])
        flat = hidden.reshape(new.rows, -1)
        normalized = layer.form.input_norm(flat)
        output, _ = self._run_layer(layer, cache, new, flat, normalized, layer.form.mlp_norm)
        return output.reshape(hidden.shape)

    def run_rest(self, number: int, hidden: mx.array, attended: mx.array) -> Pair:
        """Build one layer around its attention, for the proof.

        Args:
            number: of the layer.
            hidden: its input, [B, 1, dim].
            attended: the result of its attention, [B, 1, dim].

        Returns:
            (input of its attention, its output), [B, 1, dim].
        """
        layer, rows = self._layers[number], hidden.shape[0]
        flat, change = hidden.reshape(rows, -1), attended.reshape(rows, -1)
        new, norm = NewTokens(rows, 1, {}, invariant=self._batch_invariant), layer.form.mlp_norm
        output, _ = self._run_rest(layer, new, *self._add_norm(flat, change, norm), norm)
        normalized: mx.array = layer.form.input_norm(hidden)
        return normalized, output.reshape(hidden.shape)

    def run_attention(self, number: int, normalized: mx.array, cache: RowLayer) -> mx.array:
        """Build one layer's attention, for the proof.

        Args:
            number: of the layer.
            normalized: its input, [B, L, dim].
            cache: its rows.

        Returns:
            [B, L, dim].
        """
        rows, count, dim = normalized.shape
        new = self._new_tokens(cache, rows, count)
        attended = self._layers[number].attend(normalized.reshape(-1, dim), cache, new)
        return attended.reshape(normalized.shape)

    def _new_tokens(self, cache: RowLayer, rows: int, count: int) -> NewTokens:
        """Return the new tokens of a forward or a part of one, `count` per row of a layer."""
        view, offset = cache.view, cache.offset
        if isinstance(view, InPlaceView):
            return self._tokens_in_place(RowPlaces.of(view), rows, count)
        if isinstance(view, ConcatenatedView):
            return NewTokens(rows, count, self._concatenated_tables(view), are_concatenated=True)
        tables = self._tables(offset, rows, count)
        mask = cache.make_mask(count, return_array=self._wants_mask_array)
        invariant = self._batch_invariant and count == 1
        return NewTokens(rows, count, tables, offset, mask, invariant=invariant)

    def _tokens_in_place(self, places: RowPlaces, rows: int, count: int) -> NewTokens:
        """Return new tokens that kernels write."""
        tables = self._tables(places.lengths, rows * count, 1)
        return NewTokens(rows, count, tables, places=places, invariant=self._batch_invariant)

    def _part(self, module: Any, function: Callable[..., Any], *args: Any) -> Any:
        if self.observe is None:
            return function(*args)
        return self.observe(module, function, *args)

    def _tables(self, offset: int | mx.array, rows: int, count: int) -> dict[int, mx.array]:
        """Return the table of each rotation, by `id`."""
        return {key: one.table(offset, count, rows) for key, one in self._rotations.items()}

    def _concatenated_tables(self, view: ConcatenatedView) -> dict[int, mx.array]:
        """Return the tables of chunks side by side."""
        parts = [self._tables(one.offset, 1, one.offset_after - one.offset) for one in view.parts]
        return {key: mx.concatenate([one[key] for one in parts], axis=2) for key in parts[0]}

    def _add_norm(
        self, hidden: mx.array, change: mx.array, norm: Any, *, is_summand: bool = False
    ) -> Pair:
        add = self.sums if is_summand else self._kernels
        if add is not None:
            return add.add_norm(hidden, change, norm.weight, self._epsilons[id(norm)])
        hidden = hidden + change
        return hidden, norm(hidden)
