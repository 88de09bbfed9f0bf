"""Forwards whose kernels write the rows, as graphs that MLX compiles.

B is the number of new tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import mlx.core as mx

from services.rank_worker.kv_cache.rows.row_layers import RowLayer
from services.rank_worker.kv_cache.rows.row_views import InPlaceView
from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.model.fast_path.kernels.attention.row_places import RowPlaces, tile_count

RowArrays = Sequence[mx.array]
"""Keys and values of all rows in one layer, as `RowLayer.arrays`."""

BuildForward = Callable[[mx.array, RowPlaces, list[RowArrays]], mx.array]
"""Builds a forward: token ids, int32 [B], where they are, and the rows of each layer -> hidden
states [B, dim]."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """Settings of a graph that is compiled; forwards of another kind need another one."""

    are_prompts: bool
    """Blocks of prompts come before the arrays of the rows."""
    tiles: int
    """Of the longest row; of prompts always 0, as their kernels need no number."""
    tokens_share_rows: bool
    """See `RowPlaces`."""


class CompiledForwards:
    """Has MLX compile each kind of forward when it first occurs."""

    def __init__(
        self, build: BuildForward, query_heads: int, counter: ExpertCounter | None
    ) -> None:
        """Prepare; nothing is compiled yet.

        Args:
            build: builds one.
            query_heads: most query heads of a layer.
            counter: notes the calls of layers of experts; None: they are not counted.
        """
        self._build = build
        self._query_heads = query_heads
        self._counter = counter
        self._compiled: dict[_Kind, Callable[..., list[mx.array]]] = {}
        """Return hidden states, then the experts of each layer that the counter has noted."""
        self._noted_layers: list[int] = []
        """What the counter calls these layers."""

    def __call__(
        self,
        tokens: mx.array,
        view: InPlaceView,
        caches: Sequence[RowLayer],
        *,
        is_measured: bool,
    ) -> mx.array:
        """Build a forward.

        Args:
            tokens: int32 [B].
            view: where they are.
            caches: one per layer.
            is_measured: the parts of a graph that is compiled cannot be observed.

        Returns:
            [B, dim].
        """
        blocks = [] if view.blocks is None else [view.blocks]
        tiles = 0 if blocks else tile_count(view.longest)
        kind = _Kind(bool(blocks), tiles, view.tokens_share_rows)
        arrays = [*blocks, *(array for cache in caches for array in cache.arrays)]
        if is_measured:
            return self._build_with(len(caches), kind, tokens, view.lengths, view.slots, *arrays)
        if kind not in self._compiled:
            build = functools.partial(self._build_and_note, len(caches), kind)
            self._compiled[kind] = mx.compile(build)
        hidden, *experts = self._compiled[kind](tokens, view.lengths, view.slots, *arrays)
        if self._counter is not None:
            self._counter.note(zip(self._noted_layers, experts, strict=True))
        return hidden

    def _build_and_note(self, layers: int, kind: _Kind, *args: mx.array) -> list[mx.array]:
        """Build a forward; return also the arrays that layers of experts note while it is built."""
        if self._counter is not None:
            # Those of earlier forwards that are not counted, as in the proof.
            self._counter.take_noted()
        hidden = self._build_with(layers, kind, *args)
        if self._counter is None:
            return [hidden]
        noted = self._counter.take_noted()
        # All forwards call the same layers in the same order.
        self._noted_layers = [layer for layer, _ in noted]
        return [hidden, *(experts for _, experts in noted)]

    def _build_with(
        self,
        layers: int,
        kind: _Kind,
        tokens: mx.array,
        lengths: mx.array,
        slots: mx.array,
        *given: mx.array,
    ) -> mx.array:
        """Build a forward of arrays alone, which are what MLX's graph depends on.

        Args:
            layers: number of layers.
            kind: of the forward.
            tokens: int32 [B].
            lengths: see `RowPlaces`; so is `slots`.
            slots: of the rows.
            given: blocks of prompts, if it is of prompts; then the arrays of each layer in turn.
        """
        arrays, blocks = list(given), None
        if kind.are_prompts:
            blocks, *arrays = arrays
        shape = (tokens.shape[0], self._query_heads)
        arrived = mx.zeros(shape, dtype=mx.int32) if kind.tiles > 1 else None
        places = RowPlaces(
            lengths, slots, kind.tiles, arrived, kind.tokens_share_rows, blocks=blocks
        )
        per_layer = len(arrays) // layers
        starts = range(0, len(arrays), per_layer)
        return self._build(tokens, places, [arrays[one : one + per_layer] for one in starts])
