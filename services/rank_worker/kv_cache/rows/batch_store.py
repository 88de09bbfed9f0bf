"""Sliding windows, recurrent state and other caches, held by mlx-lm's own batch caches.

A sequence is prefilled with the model's single-sequence caches and merged into the batch when it
first decodes. Unlike rows, joining and leaving copy the batch; that is what these caches can do.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, RotatingKVCache, make_prompt_cache

from services.rank_worker.kv_cache.rows.block_layout import BlockLayout
from services.rank_worker.kv_cache.rows.cache_parts import (
    STATE_KINDS,
    PartKind,
    cut_tokens,
    leaves,
    part_kinds,
    read_state,
    write_state,
    write_tokens,
)
from services.rank_worker.kv_cache.rows.checkpoint_state import CheckpointState
from services.rank_worker.kv_cache.rows.interface import BatchView
from services.rank_worker.kv_cache.rows.kv_shapes import PROBE_TOKENS, cache_bytes, layer_shape
from shared.errors import ConfigError, InvariantBroken


class BatchStore:
    """See `KVStore`."""

    can_roll_back = False
    can_pad = False

    def __init__(self, model: nn.Module, used_caches: Sequence[Any], *, needs_state: bool) -> None:
        """Prepare for a model.

        Args:
            model: makes the caches of each sequence.
            used_caches: its caches after one forward; only their shapes are read.
            needs_state: as `needs_state` tells of the whole model; a rank whose layers have none
                sets empty ones aside.

        Raises:
            ConfigError: the model keeps a kind of state that cannot be batched.
        """
        for cache in used_caches:
            _check_batchable(cache)
        sizes = [cache_bytes(cache) for cache in used_caches]
        self.bytes_per_token = sum(size[0] for size in sizes)
        self.bytes_per_row = sum(size[1] for size in sizes)
        kinds = part_kinds(used_caches, PROBE_TOKENS)
        self._kinds = kinds or []
        self.layout = _layout(self._kinds, used_caches) if kinds is not None else None
        self.layout_text = _text(self.layout, self._kinds, used_caches) if self.layout else ""
        self.needs_state = needs_state
        self.row_count = 0
        self.row_tokens = 0
        self._model = model
        self._lengths: list[int] = []
        self._single: dict[int, list[Any]] = {}
        """By slot: caches of sequences that are not in the batch."""
        self._batch: list[Any] = []
        self._batch_slots: list[int | None] = []
        """Slot of each row of the batch; None for one that has left and is not filtered out yet."""

    def length(self, slot: int) -> int:
        """Return how many tokens the row holds."""
        return self._lengths[slot]

    def resize(self, row_count: int, row_tokens: int) -> None:
        """Take note of the bounds: these caches grow by themselves."""
        if any(self._lengths[row_count:]) or max(self._lengths, default=0) > row_tokens:
            raise InvariantBroken(
                f"rows of {self._lengths} tokens do not fit {row_count} rows of {row_tokens} each"
            )
        self._lengths = self._lengths[:row_count] + [0] * (row_count - self.row_count)
        self.row_count = row_count
        self.row_tokens = row_tokens

    def resize_waits(self, row_count: int, row_tokens: int) -> bool:
        """Return False: bounds are numbers."""
        del row_count, row_tokens
        return False

    def free(self, slot: int) -> None:
        """Empty a row."""
        self._lengths[slot] = 0
        self._single.pop(slot, None)
        if slot in self._batch_slots:
            self._batch_slots[self._batch_slots.index(slot)] = None
        if all(held is None for held in self._batch_slots):
            # Who prefills next may need their memory, and no decode comes to filter them out.
            self._batch, self._batch_slots = [], []

    def move(self, slot: int, target: int) -> None:
        """Rename a row; nothing is copied."""
        self._lengths[target] = self._lengths[slot]
        self._lengths[slot] = 0
        if slot in self._single:
            self._single[target] = self._single.pop(slot)
        if slot in self._batch_slots:
            self._batch_slots[self._batch_slots.index(slot)] = target

    def prefill(self, slot: int, count: int, columns: int = 0) -> list[Any]:
        """Lengthen one row by `count` tokens and return the caches for their forward."""
        if columns > count:
            raise InvariantBroken(f"slot {slot}: {count} tokens cannot be padded to {columns}")
        self._lengthen([slot], count)
        if slot not in self._single:
            self._single[slot] = make_prompt_cache(self._model)
        return self._single[slot]

    def prefill_together(
        self, slots: Sequence[int], counts: Sequence[int], columns: int = 0
    ) -> list[Any]:
        """Refuse: recurrent state would run on over the padding."""
        del columns
        raise InvariantBroken(f"slots {list(slots)} ({list(counts)} tokens) cannot be padded")

    def decode(self, slots: Sequence[int], count: int) -> BatchView:
        """Lengthen these rows by one token each and return the view for their forward."""
        if count != 1:
            raise InvariantBroken(f"{count} tokens per row, but these rows cannot be rolled back")
        self._lengthen(slots, count)
        self._take_out(set(slots))
        self._put_in([slot for slot in slots if slot in self._single])
        order = [slot for slot in self._batch_slots if slot is not None]
        rows = None if order == list(slots) else [order.index(slot) for slot in slots]
        return BatchView(self._batch, order, rows)

    def roll_back(self, slot: int, length: int) -> None:
        """Refuse: a window or a recurrent state has forgotten what came before.

        mlx-lm's batch caches of plain keys and values can be trimmed, but only all rows by one
        number: rows that accept unequal numbers of drafts would be copied to new padding.
        """
        raise InvariantBroken(f"slot {slot} cannot be cut to {length} tokens")

    def read_block(self, slot: int, start: int, stop: int) -> mx.array:
        """Copy what tokens [start, stop) of a row have in layers of plain keys and values."""
        length = self._lengths[slot]
        if self.layout is None or not 0 <= start < stop <= length:
            raise InvariantBroken(f"slot {slot} holds {length} tokens, not [{start}, {stop})")
        parts: list[mx.array] = []
        caches, row = self._find(slot)
        for kind, cache in zip(self._kinds, leaves(caches), strict=True):
            if kind == "tokens":
                parts += cut_tokens(cache, row, length, start, stop)
        return self.layout.pack(parts)

    def read_blocks(self, slot: int, start: int, tokens: int, count: int) -> list[mx.array]:
        """Copy consecutive blocks, one by one."""
        firsts = range(start, start + count * tokens, tokens)
        return [self.read_block(slot, first, first + tokens) for first in firsts]

    def read_state(self, slot: int) -> CheckpointState:
        """Set the state of a row aside: windows and recurrent state, copied out of the batch."""
        if not self.needs_state:
            raise InvariantBroken(f"slot {slot} has no state that could be set aside")
        parts = []
        caches, row = self._find(slot)
        for kind, cache in zip(self._kinds, leaves(caches), strict=True):
            if kind == "unused" and not cache.empty():
                raise InvariantBroken(f"slot {slot} uses a layer that was unused at load")
            if kind in STATE_KINDS:
                parts.append(read_state(cache, row, self._lengths[slot]))
        return CheckpointState(self._lengths[slot], parts)

    def fill(
        self,
        slot: int,
        length: int,
        blocks: Sequence[tuple[mx.array, int]],
        state: CheckpointState | None,
    ) -> None:
        """Build the caches of an empty row, as a prefill of so many tokens leaves them."""
        held = sum(tokens for _, tokens in blocks)
        fits = length == held == state.tokens if state is not None else length <= held
        if self.layout is None or self._lengths[slot] or not fits:
            raise InvariantBroken(
                f"slot {slot} holds {self._lengths[slot]} tokens; cannot give it {length} of "
                f"{held}, state at {state and state.tokens}"
            )
        if (state is not None) != self.needs_state:
            raise InvariantBroken(f"slot {slot} needs a state at {length} tokens, or has none")
        self._lengthen([slot], length)
        unpacked = [self.layout.unpack(payload, tokens, tokens) for payload, tokens in blocks]
        members = (mx.concatenate(list(cut), axis=2) for cut in zip(*unpacked, strict=True))
        parts = iter(state.parts if state is not None else [])
        caches = make_prompt_cache(self._model)
        for kind, cache in zip(self._kinds, leaves(caches), strict=True):
            if kind == "tokens":
                keys, values = next(members), next(members)
                write_tokens(cache, keys[:, :, :length], values[:, :, :length])
            elif kind in STATE_KINDS:
                write_state(cache, next(parts), length)
        self._single[slot] = caches

    def first_layers(self, share: float) -> mx.array | None:
        """Return nothing: what mlx-lm's caches hold of a graph differs by their kind."""
        del share
        return None

    def marker(self) -> mx.array:
        """Return a small array that is computed once all state is. It shares no memory with it."""
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

    def _take_out(self, staying: set[int]) -> None:
        """Filter the batch to these slots; members that only pause keep their state."""
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

    def _put_in(self, joining: list[int]) -> None:
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

    def _lengthen(self, slots: Sequence[int], count: int) -> None:
        for slot in slots:
            length = self._lengths[slot] + count
            if length > self.row_tokens:
                raise InvariantBroken(
                    f"slot {slot} would hold {length} tokens, rows have room for {self.row_tokens}"
                )
            self._lengths[slot] = length


def needs_state(used_caches: Sequence[Any]) -> bool:
    """Tell whether rows with such caches, after a forward, are rebuilt only with a state."""
    return any(kind in STATE_KINDS for kind in part_kinds(used_caches, PROBE_TOKENS) or [])


def _layout(kinds: Sequence[PartKind], used_caches: Sequence[Any]) -> BlockLayout:
    cut = [
        layer_shape(leaf)
        for kind, leaf in zip(kinds, leaves(used_caches), strict=True)
        if kind == "tokens"
    ]
    return BlockLayout([member for shape in cut for member in shape.members])


def _text(layout: BlockLayout, kinds: Sequence[PartKind], used_caches: Sequence[Any]) -> str:
    states = [
        f"window of {leaf.max_size}" if kind == "window" else kind
        for kind, leaf in zip(kinds, leaves(used_caches), strict=True)
        if kind in STATE_KINDS
    ]
    runs = [f"{len(list(same))} {state}" for state, same in itertools.groupby(states)]
    return f"{layout.text}; state: {', '.join(runs)}" if runs else layout.text


def _check_batchable(cache: Any) -> None:
    parts = cache.caches if isinstance(cache, CacheList) else [cache]
    for part in parts:
        if isinstance(part, CacheList):
            _check_batchable(part)
        elif not hasattr(type(part), "merge"):
            raise ConfigError(
                f"This model keeps its state in a {type(part).__name__}, which cannot be batched: "
                "choose another model."
            )
        elif isinstance(part, RotatingKVCache) and part.keep:
            raise ConfigError(
                f"This model keeps its first {part.keep} tokens beside a sliding window, which "
                "cannot be batched: choose another model."
            )
