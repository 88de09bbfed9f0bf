"""Rows of plain keys and values, left-aligned, each with its own length.

Adding, removing and rolling back sequences only changes lengths on the host. New tokens are written
at the end of their row. MLX writes the arrays in place, so nothing else is copied.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from services.rank_worker.device.execution_profile import RESIZE_AT_ONCE_BYTES_MAX
from services.rank_worker.kv_cache.rows.block_layout import BlockLayout, BlockPart
from services.rank_worker.kv_cache.rows.checkpoint_state import CheckpointState
from services.rank_worker.kv_cache.rows.interface import BatchView, KVStore
from services.rank_worker.kv_cache.rows.row_layers import View, make_row_layer
from services.rank_worker.kv_cache.rows.row_views import (
    ConcatenatedView,
    InPlaceView,
    PaddedView,
    RaggedView,
    UniformView,
    prompt_blocks,
)
from shared.errors import InvariantBroken

RUN_BYTES_MAX = 512 * 1024 * 1024
"""Limit for consecutive blocks that are copied together between blocks and a row on a GPU. A CPU
copies each block by itself, which takes half the time there."""

_LAYERS_MIN = 4
"""In a model with fewer layers, one layer is a large part of a forward."""


class RowStore(KVStore):
    """KV of models with plain keys and values, one preallocated row per slot."""

    can_pad = True
    layout: BlockLayout

    def __init__(
        self,
        layers: Sequence[Sequence[BlockPart]],
        bits: int = 0,
        *,
        reads_packed: bool | None = None,
        can_roll_back: bool = True,
        resize_at_once_bytes_max: int = RESIZE_AT_ONCE_BYTES_MAX,
    ) -> None:
        """Make empty rows.

        Args:
            layers: shapes of each layer's keys and values, as `layer_parts` returns them.
            bits: bits per stored number, 4 or 8; 0: the type that the model computes.
            reads_packed: see `make_row_layer`.
            can_roll_back: whether the model can decode several tokens per row, so that it can
                verify drafts.
            resize_at_once_bytes_max: larger rows are resized layer by layer, see
                `resize_waits_for_device`.

        Raises:
            ValueError: when these shapes cannot be quantized.
        """
        super().__init__()
        self._layers = [make_row_layer(parts, bits, reads_packed=reads_packed) for parts in layers]
        self.can_roll_back = can_roll_back
        self.is_quantized = bits > 0
        self.layout = BlockLayout([part for layer in self._layers for part in layer.parts])
        self.layout_text = self.layout.text
        self._resize_at_once_bytes_max = resize_at_once_bytes_max
        self.bytes_per_token = self.layout.block_bytes(1)
        self.run_bytes_max = 0 if mx.default_device().type == mx.DeviceType.cpu else RUN_BYTES_MAX
        """Limit for consecutive blocks that are copied together, in bytes; 0: each by itself."""

    def resize(self, row_count: int, row_tokens: int) -> None:
        """Set the number of rows and their capacity in tokens; contents are kept.

        Raises:
            InvariantBroken: when a row's contents do not fit.
        """
        if row_count == self.row_count and row_tokens == self.row_tokens:
            return
        waits = self.resize_waits_for_device(row_count, row_tokens)
        super().resize(row_count, row_tokens)
        rows = max((slot + 1 for slot, length in enumerate(self._lengths) if length), default=0)
        columns = max(self._lengths, default=0)
        for layer in self._layers:
            layer.resize(row_count, row_tokens, rows, columns)
            if waits:
                mx.eval(layer.arrays)
                mx.clear_cache()

    def resize_waits_for_device(self, row_count: int, row_tokens: int) -> bool:
        """Tell whether `resize` to this size waits for the device, layer by layer, to save memory.

        Args:
            row_count: number of rows.
            row_tokens: capacity of each row in tokens.
        """
        if row_count == self.row_count and row_tokens == self.row_tokens:
            return False
        return row_count * row_tokens * self.bytes_per_token > self._resize_at_once_bytes_max

    def copies_wait_for_device(self, rows: int, tokens: int, count: int) -> bool:
        """Tell whether a forward waits for the device, because its copies of KV are large.

        Arguments are those of `KVStore.copies_wait_for_device`.
        """
        return any(one.copies_wait_for_device(rows, tokens, count) for one in self._layers)

    def move(self, slot: int, target: int) -> None:
        """Copy the row in `slot` to the free slot `target` and empty it; waits for the device."""
        length = self._lengths[slot]
        arrays = self._arrays()
        copies = [mx.contiguous(array[slot : slot + 1, :, :length]) for array in arrays]
        # Wait, because a view that is still in use prevents writing its array in place.
        mx.eval(copies)
        for array, copied in zip(arrays, copies, strict=True):
            array[target : target + 1, :, :length] = copied
        super().move(slot, target)

    def prefill(self, slot: int, count: int, columns: int = 0) -> list[Any]:
        """Lengthen a row by `count` tokens and return the caches for their forward.

        Arguments and results are those of `KVStore.prefill`.
        """
        start = self._lengths[slot]
        self._lengthen([slot], [count])
        # Padding after the row's length is masked, and overwritten by later tokens.
        return self._set_view(UniformView(slot, slot + 1, start, start + (columns or count)))

    def prefill_padded(
        self, slots: Sequence[int], counts: Sequence[int], columns: int = 0
    ) -> list[Any]:
        """Lengthen several empty rows and return the caches for one right-padded forward.

        Arguments and results are those of `KVStore.prefill_padded`.
        """
        if any(self._lengths[slot] for slot in slots):
            raise InvariantBroken(f"slots {list(slots)} are not all empty")
        self._lengthen(slots, counts)
        return self._set_view(PaddedView(slots, columns or max(counts)))

    def prefill_concatenated(
        self, slots: Sequence[int], counts: Sequence[int], columns: Sequence[int]
    ) -> list[Any]:
        """Lengthen several rows and return the caches for a forward over chunks side by side.

        Arguments and results are those of `KVStore.prefill_concatenated`.
        """
        starts = [self._lengths[slot] for slot in slots]
        self._lengthen(slots, counts)
        parts = [
            UniformView(slot, slot + 1, start, start + width)
            for slot, start, width in zip(slots, starts, columns, strict=True)
        ]
        return self._set_view(ConcatenatedView(parts))

    def prefill_in_place(
        self, slots: Sequence[int], counts: Sequence[int], columns: Sequence[int]
    ) -> list[Any]:
        """Lengthen several rows and return the caches for a forward that writes them in place.

        Arguments and results are those of `KVStore.prefill_in_place`.
        """
        chunks = list(zip([self._lengths[slot] for slot in slots], counts, columns, strict=True))
        self._lengthen(slots, counts)
        lengths = [
            start + np.minimum(np.arange(width), count - 1) for start, count, width in chunks
        ]
        token_slots = np.repeat(np.array(slots), columns)
        blocks = prompt_blocks(columns)
        view = InPlaceView(
            token_slots, np.concatenate(lengths), tokens_share_rows=True, blocks=blocks
        )
        return self._set_view(view)

    def decode(self, slots: Sequence[int], count: int) -> BatchView:
        """Lengthen rows by `count` tokens each and return the caches for their forward.

        Arguments and results are those of `KVStore.decode`.
        """
        before = list(self._lengths)
        self._lengthen(slots, [count] * len(slots))
        if self.writes_in_place and count == 1:
            in_place = InPlaceView(slots, [before[slot] for slot in slots])
            return BatchView(self._set_view(in_place), list(slots), None)
        start = before[slots[0]]
        are_adjacent = slots[-1] - slots[0] + 1 == len(slots)
        if are_adjacent and all(before[slot] == start for slot in slots):
            view = UniformView(slots[0], slots[-1] + 1, start, start + count)
            return BatchView(self._set_view(view), list(slots), None)
        caches = self._set_view(RaggedView(before, slots, count, self.row_tokens))
        rows = range(slots[-1] + 1)
        return BatchView(caches, list(rows), None if len(slots) == len(rows) else list(slots))

    def decode_tokens(
        self, slots: Sequence[int], counts: Sequence[int], repeated: Sequence[int]
    ) -> list[Any]:
        """Lengthen rows and return the caches for a forward over each token by itself.

        Arguments and results are those of `KVStore.decode_tokens`.
        """
        tokens = [
            (slot, self._lengths[slot] + place)
            for slot, count in zip(slots, counts, strict=True)
            for place in range(count)
        ]
        self._lengthen(slots, counts)
        # A token that is repeated is written with the same numbers.
        tokens += [tokens[index] for index in repeated]
        token_slots, lengths = zip(*tokens, strict=True)
        return self._set_view(InPlaceView(token_slots, lengths, tokens_share_rows=True))

    def roll_back(self, slot: int, length: int) -> None:
        """Shorten a row to `length` tokens; only the length changes, nothing is copied.

        Raises:
            InvariantBroken: when the row is shorter.
        """
        if not 0 <= length <= self._lengths[slot]:
            raise InvariantBroken(
                f"slot {slot} holds {self._lengths[slot]} tokens and cannot be cut to {length}"
            )
        self._lengths[slot] = length

    def read_block(self, slot: int, start: int, stop: int) -> mx.array:
        """Copy tokens [start, stop) of a row into one block, uint8 [bytes]."""
        return self.layout.pack(self._slices(slot, start, stop))

    def read_blocks(self, slot: int, start: int, tokens: int, count: int) -> list[mx.array]:
        """Copy consecutive blocks of a row; on a GPU several at once, which waits for the copies.

        Arguments and results are those of `KVStore.read_blocks`.
        """
        blocks: list[mx.array] = []
        # Packing a run needs two more copies of it until it is done, so wait for each run.
        size = 3 * self.layout.block_bytes(tokens)
        blocks_per_run = max(1, self.run_bytes_max // size) if size else 1
        while len(blocks) < count:
            first = start + len(blocks) * tokens
            run = min(blocks_per_run, count - len(blocks))
            if run == 1:
                blocks.append(self.read_block(slot, first, first + tokens))
            else:
                parts = self._slices(slot, first, first + run * tokens)
                packed = self.layout.pack_run(parts, tokens, run)
                mx.eval(packed)
                blocks += packed
        return blocks

    def fill_row(
        self,
        slot: int,
        length: int,
        blocks: Sequence[tuple[mx.array, int]],
        state: CheckpointState | None,
    ) -> None:
        """Fill an empty row from blocks, with one slice update per layer and run of blocks.

        Args:
            slot: the row.
            length: number of tokens in the row afterwards.
            blocks: (payload, uint8 [bytes], tokens in it), from the first token on; `length` tokens
                or more.
            state: must be None, because rows of plain keys and values need no checkpoint.

        Raises:
            InvariantBroken: when the row is not empty, the blocks are too short, or there is a
                state.
        """
        held = sum(tokens for _, tokens in blocks)
        if self._lengths[slot] or state is not None or length > held:
            raise InvariantBroken(
                f"slot {slot} holds {self._lengths[slot]} tokens; cannot give it {length} of {held}"
            )
        self._lengthen([slot], [length])
        start = 0
        for payloads, tokens in self._runs(blocks):
            stop = min(start + tokens * len(payloads), length)
            if len(payloads) == 1:
                parts = self.layout.unpack(payloads[0], tokens, stop - start)
            else:
                parts = self.layout.unpack_run(payloads, tokens, stop - start)
            for array, part in zip(self._arrays(), parts, strict=True):
                array[slot : slot + 1, :, start:stop] = part
            start = stop

    def _slices(self, slot: int, start: int, stop: int) -> list[mx.array]:
        """Return views of tokens [start, stop) of a row, one per part."""
        if not 0 <= start < stop <= self._lengths[slot]:
            raise InvariantBroken(
                f"slot {slot} holds {self._lengths[slot]} tokens, not [{start}, {stop})"
            )
        return [array[slot : slot + 1, :, start:stop] for array in self._arrays()]

    def _runs(self, blocks: Sequence[tuple[mx.array, int]]) -> Iterator[tuple[list[mx.array], int]]:
        """Yield (payloads, tokens per block) for runs of equal blocks, bounded in bytes."""
        run: list[mx.array] = []
        run_tokens = 0
        for payload, tokens in blocks:
            fits = (len(run) + 1) * payload.nbytes <= self.run_bytes_max
            if run and not (fits and tokens == run_tokens):
                yield run, run_tokens
                run = []
            run.append(payload)
            run_tokens = tokens
        if run:
            yield run, run_tokens

    def early_layer_keys(self, share: float) -> mx.array | None:
        """Return the keys of an early layer, so that a forward can be started in two parts.

        Evaluating them runs the layers of the last forward before that layer, and not the others.

        Arguments and results are those of `KVStore.early_layer_keys`.
        """
        if len(self._layers) < _LAYERS_MIN or isinstance(self._layers[0].view, InPlaceView):
            return None
        # The keys of a layer depend on all layers before it, and on little else.
        return self._layers[max(1, int(share * len(self._layers)))].keys

    def marker(self) -> mx.array:
        """Return a scalar, shape [], whose evaluation runs all forwards built so far.

        It depends on all KV that they write, and has memory of its own.
        """
        corners = [array[:1, :1, :1, :1] for array in self._arrays()]
        # A sum has its own memory. A view would prevent the next step from writing in place.
        return mx.concatenate(corners).sum()

    def _arrays(self) -> list[mx.array]:
        return [array for layer in self._layers for array in layer.arrays]

    def _set_view(self, view: View) -> list[Any]:
        for layer in self._layers:
            layer.view = view
            layer.offset = view.offset
        return list(self._layers)
