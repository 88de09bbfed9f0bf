"""KV in mlx-lm's own batch caches: sliding windows, recurrent state and others.

A sequence is prefilled with single-sequence caches and merged into the batch when it first decodes.
Unlike with `RowStore`, adding or removing a sequence copies the batch.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from services.rank_worker.kv_cache.rows.block_layout import BlockLayout
from services.rank_worker.kv_cache.rows.cache_parts import (
    STATE_KINDS,
    PartKind,
    leaf_caches,
    part_kinds,
    read_state,
    slice_tokens,
    write_state,
    write_tokens,
)
from services.rank_worker.kv_cache.rows.checkpoint_state import CheckpointState
from services.rank_worker.kv_cache.rows.interface import BatchView, KVStore
from services.rank_worker.kv_cache.rows.kv_shapes import (
    PROBE_TOKENS,
    cache_bytes,
    layer_parts,
    unbatchable,
)
from shared.errors import ConfigError, InvariantBroken


class BatchCacheStore(KVStore):
    """KV of models with windows or recurrent state, in mlx-lm's batch caches.

    Rows cannot be padded, because the state would process padding, and not be rolled back: mlx-lm's
    batch caches of plain keys and values can be trimmed, but only all rows by the same number of
    tokens, while rows accept different numbers of drafts.
    """

    can_roll_back = False
    can_pad = False

    def __init__(self, model: nn.Module, used_caches: Sequence[Any], *, needs_state: bool) -> None:
        """Prepare for a model.

        Args:
            model: makes the caches of each sequence.
            used_caches: caches after one forward; only their shapes are read.
            needs_state: result of `needs_state` for the whole model. A rank whose layers have no
                state keeps empty ones.

        Raises:
            ConfigError: when the model has a kind of state that cannot be batched.
        """
        super().__init__()
        _check_batchable(used_caches)
        self.bytes_per_token, self.bytes_per_row = cache_bytes(used_caches)
        kinds = part_kinds(used_caches, PROBE_TOKENS)
        self._kinds = kinds or []
        self.layout = _layout(self._kinds, used_caches) if kinds is not None else None
        self.layout_text = _text(self.layout, self._kinds, used_caches) if self.layout else ""
        self.needs_state = needs_state
        self._model = model
        self._single: dict[int, list[Any]] = {}
        """Caches of sequences that are not in the batch, by slot."""
        self._batch: list[Any] = []
        self._batch_slots: list[int | None] = []
        """Slot of each row of the batch; None for a row that is free but not yet removed."""

    def free(self, slot: int) -> None:
        """Empty a row, so that its slot can be reused."""
        super().free(slot)
        self._single.pop(slot, None)
        if slot in self._batch_slots:
            self._batch_slots[self._batch_slots.index(slot)] = None
        if all(held is None for held in self._batch_slots):
            # Free the memory now, because no decode follows that would remove the rows.
            self._batch, self._batch_slots = [], []

    def move(self, slot: int, target: int) -> None:
        """Give the row in `slot` the free slot `target`; nothing is copied."""
        super().move(slot, target)
        if slot in self._single:
            self._single[target] = self._single.pop(slot)
        if slot in self._batch_slots:
            self._batch_slots[self._batch_slots.index(slot)] = target

    def prefill(self, slot: int, count: int, columns: int = 0) -> list[Any]:
        """Lengthen a row by `count` tokens and return the caches for their forward.

        Arguments and results are those of `KVStore.prefill`.
        """
        if columns > count:
            raise InvariantBroken(f"slot {slot}: {count} tokens cannot be padded to {columns}")
        self._lengthen([slot], [count])
        if slot not in self._single:
            self._single[slot] = make_prompt_cache(self._model)
        return self._single[slot]

    def decode(self, slots: Sequence[int], count: int) -> BatchView:
        """Lengthen rows by one token each and return the caches for their forward.

        Args:
            slots: rows in rising order.
            count: tokens per row; must be 1.

        Returns:
            The caches and the slot of each row of the forward.

        Raises:
            InvariantBroken: when a row has no room or `count` is not 1.
        """
        if count != 1:
            raise InvariantBroken(f"{count} tokens per row, but these rows cannot be rolled back")
        self._lengthen(slots, [count] * len(slots))
        self._remove_others(set(slots))
        self._add([slot for slot in slots if slot in self._single])
        batch_slots = [slot for slot in self._batch_slots if slot is not None]
        rows = None if batch_slots == list(slots) else [batch_slots.index(slot) for slot in slots]
        return BatchView(self._batch, batch_slots, rows)

    def read_block(self, slot: int, start: int, stop: int) -> mx.array:
        """Copy the plain keys and values of tokens [start, stop) of a row, uint8 [bytes]."""
        length = self._lengths[slot]
        if self.layout is None or not 0 <= start < stop <= length:
            raise InvariantBroken(f"slot {slot} holds {length} tokens, not [{start}, {stop})")
        parts: list[mx.array] = []
        caches, row = self._find(slot)
        for kind, cache in zip(self._kinds, leaf_caches(caches), strict=True):
            if kind == "tokens":
                parts += slice_tokens(cache, row, length, start, stop)
        return self.layout.pack(parts)

    def read_state(self, slot: int) -> CheckpointState:
        """Return a copy of the windows and recurrent state of a row."""
        if not self.needs_state:
            raise InvariantBroken(f"slot {slot} has no state that could be kept")
        parts = []
        caches, row = self._find(slot)
        for kind, cache in zip(self._kinds, leaf_caches(caches), strict=True):
            if kind == "unused" and not cache.empty():
                raise InvariantBroken(f"slot {slot} uses a layer that was unused at load")
            if kind in STATE_KINDS:
                parts.append(read_state(cache, row, self._lengths[slot]))
        return CheckpointState(self._lengths[slot], parts)

    def fill_row(
        self,
        slot: int,
        length: int,
        blocks: Sequence[tuple[mx.array, int]],
        state: CheckpointState | None,
    ) -> None:
        """Build the caches of an empty row as a prefill of `length` tokens would leave them.

        Arguments and results are those of `KVStore.fill_row`.
        """
        held = sum(tokens for _, tokens in blocks)
        fits = length == held == state.tokens if state is not None else length <= held
        if self.layout is None or self._lengths[slot] or not fits:
            raise InvariantBroken(
                f"slot {slot} holds {self._lengths[slot]} tokens; cannot give it {length} of "
                f"{held}, state at {state and state.tokens}"
            )
        if (state is not None) != self.needs_state:
            raise InvariantBroken(f"slot {slot} needs a state at {length} tokens, or has none")
        self._lengthen([slot], [length])
        unpacked = [self.layout.unpack(payload, tokens, tokens) for payload, tokens in blocks]
        arrays = (mx.concatenate(list(part), axis=2) for part in zip(*unpacked, strict=True))
        parts = iter(state.parts if state is not None else [])
        caches = make_prompt_cache(self._model)
        for kind, cache in zip(self._kinds, leaf_caches(caches), strict=True):
            if kind == "tokens":
                keys, values = next(arrays), next(arrays)
                write_tokens(cache, keys[:, :, :length], values[:, :, :length])
            elif kind in STATE_KINDS:
                write_state(cache, next(parts), length)
        self._single[slot] = caches

    def marker(self) -> mx.array:
        """Return a scalar, float32 [], whose evaluation computes all state of all rows.

        It has memory of its own, so it does not prevent in-place writes.
        """
        groups = [self._batch, *self._single.values()]
        states = [cache.state for caches in groups for cache in caches]
        corners = [
            array.reshape(-1)[:1].astype(mx.float32)
            for array in dict(tree_flatten(states)).values()
            if isinstance(array, mx.array) and array.size
        ]
        return mx.concatenate([*corners, mx.zeros((1,))]).sum()

    def _find(self, slot: int) -> tuple[list[Any], int]:
        """Return the caches that hold a row, and its index in them."""
        if slot in self._single:
            return self._single[slot], 0
        if slot not in self._batch_slots:
            raise InvariantBroken(f"slot {slot} is empty")
        return self._batch, self._batch_slots.index(slot)

    def _remove_others(self, staying: set[int]) -> None:
        """Reduce the batch to these slots; other sequences keep their state outside of it."""
        keep = [row for row, slot in enumerate(self._batch_slots) if slot in staying]
        if len(keep) == len(self._batch_slots):
            return
        for row, slot in enumerate(self._batch_slots):
            if slot is not None and slot not in staying:
                self._single[slot] = [cache.extract(row) for cache in self._batch]
        if keep:
            for cache in self._batch:
                cache.filter(keep)
        else:
            self._batch = []
        self._batch_slots = [self._batch_slots[row] for row in keep]

    def _add(self, joining: list[int]) -> None:
        """Merge sequences into the batch."""
        if not joining:
            return
        singles = [self._single.pop(slot) for slot in joining]
        merged = [type(layer[0]).merge(list(layer)) for layer in zip(*singles, strict=True)]
        if self._batch:
            for cache, other in zip(self._batch, merged, strict=True):
                cache.extend(other)
        else:
            self._batch = merged
        self._batch_slots += joining


def needs_state(used_caches: Sequence[Any]) -> bool:
    """Tell whether rows with such caches can be rebuilt from blocks only with a checkpoint.

    Args:
        used_caches: one cache per layer, after a forward of `PROBE_TOKENS` tokens.

    Returns:
        True when a layer has a window or recurrent arrays, which blocks do not hold.
    """
    return any(kind in STATE_KINDS for kind in part_kinds(used_caches, PROBE_TOKENS) or [])


def _layout(kinds: Sequence[PartKind], used_caches: Sequence[Any]) -> BlockLayout:
    leaves = zip(kinds, leaf_caches(used_caches), strict=True)
    return BlockLayout(
        [part for kind, leaf in leaves if kind == "tokens" for part in layer_parts(leaf)]
    )


def _text(layout: BlockLayout, kinds: Sequence[PartKind], used_caches: Sequence[Any]) -> str:
    states = [
        f"window of {leaf.max_size}" if kind == "window" else kind
        for kind, leaf in zip(kinds, leaf_caches(used_caches), strict=True)
        if kind in STATE_KINDS
    ]
    runs = [f"{len(list(same))} {state}" for state, same in itertools.groupby(states)]
    return f"{layout.text}; state: {', '.join(runs)}" if runs else layout.text


def _check_batchable(used_caches: Sequence[Any]) -> None:
    for cache in leaf_caches(used_caches):
        if not hasattr(type(cache), "merge"):
            raise unbatchable(cache)
        if isinstance(cache, RotatingKVCache) and cache.keep:
            raise ConfigError(
                f"This model keeps its first {cache.keep} tokens beside a sliding window, which "
                "cannot be batched: choose another model."
            )
