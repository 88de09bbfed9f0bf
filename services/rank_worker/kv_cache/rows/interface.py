"""The interface through which the executor uses the KV of running sequences."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from services.rank_worker.kv_cache.rows.block_layout import BlockLayout
from services.rank_worker.kv_cache.rows.checkpoint_state import CheckpointState
from shared.errors import InvariantBroken


@dataclasses.dataclass(frozen=True, slots=True)
class BatchView:
    """The caches of a forward that decodes some rows, and the slot of each row of that forward."""

    caches: list[Any]
    """One object per layer, passed to the model as `cache`."""
    input_slots: list[int]
    """Slot of each row of the model's input. Slots that were not requested may take any token."""
    output_rows: list[int] | None
    """Row of the model's output for each requested slot; None when they are in the same order."""


class KVStore(abc.ABC):
    """The KV of the running batch: one row per slot. Base class of RowStore and BatchCacheStore.

    Row lengths are known on the host, because plans alone determine them. Methods that a kind of
    rows does not support raise InvariantBroken.
    """

    bytes_per_token: int
    """KV bytes of one token of one row, in all layers."""
    bytes_per_row: int = 0
    """Bytes of one row that do not depend on its length, such as recurrent state."""
    can_roll_back: bool
    """Whether a row can be shortened to remove rejected drafts; required for speculation."""
    can_pad: bool
    """Whether several empty rows can be prefilled in one right-padded forward."""
    layout: BlockLayout | None
    """Byte layout of blocks; None when rows of this model cannot be rebuilt from blocks."""
    layout_text: str
    """Description of the byte layout of blocks and checkpoints; "" without a layout.

    Ranks of one model with equal texts could exchange blocks."""
    writes_in_place: bool = False
    """Whether decodes write rows without MLX's knowledge, see `InPlaceView`. Nothing else may use
    rows before such a decode has ended. Only then there is `decode_tokens`."""
    prefills_in_place: bool = False
    """Whether prompts can write rows in this way too. Only then there is `prefill_in_place`."""
    can_concatenate: bool = False
    """Whether chunks of several rows can be computed side by side. Only then there is
    `prefill_concatenated`."""
    is_quantized: bool = False
    """Whether numbers have fewer bits than the model's, so that attention reads copies of them."""
    needs_state: bool = False
    """Whether a row can be rebuilt from blocks only together with a checkpoint at their end."""

    def __init__(self) -> None:
        self.row_count = 0
        """Number of rows: slots 0 to row_count - 1."""
        self.row_tokens = 0
        """Capacity of each row in tokens."""
        self._lengths: list[int] = []
        """Number of tokens in each row, by slot."""

    def serve_layers(
        self, *, writes_in_place: bool, prefills_in_place: bool, can_concatenate: bool
    ) -> None:
        """Set how a model's layers use these rows, before the first step.

        Args:
            writes_in_place: whether kernels write the rows of decodes.
            prefills_in_place: whether they write those of prompts too.
            can_concatenate: whether the layers compute chunks of several rows side by side; rows of
                which attention reads copies cannot be used so.
        """
        self.writes_in_place = writes_in_place
        self.prefills_in_place = prefills_in_place
        self.can_concatenate = can_concatenate and not self.is_quantized

    def block_bytes(self, tokens: int) -> int:
        """Return the bytes of a block of `tokens` tokens; 0 where blocks cannot be kept."""
        return self.layout.block_bytes(tokens) if self.layout is not None else 0

    def length(self, slot: int) -> int:
        """Return the number of tokens in a row."""
        return self._lengths[slot]

    def resize(self, row_count: int, row_tokens: int) -> None:
        """Set the number of rows and their capacity in tokens; contents are kept.

        Raises:
            InvariantBroken: when a row's contents do not fit.
        """
        if any(self._lengths[row_count:]) or max(self._lengths, default=0) > row_tokens:
            raise InvariantBroken(
                f"rows of {self._lengths} tokens do not fit {row_count} rows of {row_tokens} each"
            )
        self._lengths = self._lengths[:row_count] + [0] * (row_count - self.row_count)
        self.row_count = row_count
        self.row_tokens = row_tokens

    def resize_waits_for_device(self, row_count: int, row_tokens: int) -> bool:
        """Tell whether `resize` to this size waits until the device has finished all earlier work.

        Args:
            row_count: number of rows.
            row_tokens: capacity of each row in tokens.
        """
        del row_count, row_tokens
        return False

    def copies_wait_for_device(self, rows: int, tokens: int, count: int) -> bool:
        """Tell whether a forward waits for the device, layer by layer, to save memory for copies.

        Args:
            rows: of the forward.
            tokens: of the longest row.
            count: new tokens per row.
        """
        del rows, tokens, count
        return False

    def free(self, slot: int) -> None:
        """Empty a row, so that its slot can be reused."""
        self._lengths[slot] = 0

    def move(self, slot: int, target: int) -> None:
        """Move a row to a free slot; no other row is copied.

        Args:
            slot: the row's slot.
            target: the free slot.
        """
        self._lengths[target], self._lengths[slot] = self._lengths[slot], 0

    @abc.abstractmethod
    def prefill(self, slot: int, count: int, columns: int = 0) -> list[Any]:
        """Lengthen a row by `count` tokens and return the caches for their forward.

        Args:
            slot: the row.
            count: number of tokens.
            columns: width of the right-padded input; 0: `count`. More than `count` only if rows can
                be padded and have room.

        Returns:
            One cache per layer, passed to the model as `cache`.

        Raises:
            InvariantBroken: when the row has no room.
        """

    def prefill_padded(
        self, slots: Sequence[int], counts: Sequence[int], columns: int = 0
    ) -> list[Any]:
        """Lengthen several empty rows and return the caches for one right-padded forward.

        Args:
            slots: empty rows, each once.
            counts: number of tokens of each.
            columns: width of the input; 0: the largest of `counts`.

        Returns:
            One cache per layer, passed to the model as `cache`.

        Raises:
            InvariantBroken: when a row is not empty, has no room, or rows cannot be padded.
        """
        del columns
        raise InvariantBroken(f"slots {list(slots)} ({list(counts)} tokens) cannot be padded")

    def prefill_concatenated(
        self, slots: Sequence[int], counts: Sequence[int], columns: Sequence[int]
    ) -> list[Any]:
        """Lengthen several rows and return the caches for a forward over chunks side by side.

        Only where `can_concatenate`.

        Args:
            slots: the rows, each once.
            counts: number of tokens of each.
            columns: width of each in the input, padded on the right; at least its tokens, and more
                only if its row has room.

        Returns:
            One cache per layer, passed to the model as `cache`.

        Raises:
            InvariantBroken: when a row has no room, or chunks cannot be concatenated.
        """
        del columns
        raise InvariantBroken(f"slots {list(slots)} ({list(counts)} tokens) cannot be concatenated")

    def prefill_in_place(
        self, slots: Sequence[int], counts: Sequence[int], columns: Sequence[int]
    ) -> list[Any]:
        """Do as `prefill_concatenated`, for a forward that writes rows in place.

        Only where `prefills_in_place`. Rows need no room for padding, which is not written.

        Args:
            slots: the rows, each once.
            counts: number of tokens of each.
            columns: width of each in the input, padded on the right.

        Returns:
            One cache per layer, passed to the model as `cache`.

        Raises:
            InvariantBroken: when a row has no room, or prompts do not write rows in place.
        """
        del columns
        raise InvariantBroken(
            f"slots {list(slots)} ({list(counts)} tokens) are not prefilled in place"
        )

    @abc.abstractmethod
    def decode(self, slots: Sequence[int], count: int) -> BatchView:
        """Lengthen rows by `count` tokens each and return the caches for their forward.

        Args:
            slots: rows in rising order. Other rows are not changed.
            count: tokens per row: 1, or k + 1 to verify k drafts; see `decode_padded` for rows with
                different numbers of drafts.

        Returns:
            The caches and the slot of each row of the forward.

        Raises:
            InvariantBroken: when a row has no room, or `count` is not supported.
        """

    def decode_padded(self, slots: Sequence[int], counts: Sequence[int]) -> BatchView:
        """Lengthen rows by different numbers of tokens and return the caches for one forward.

        The KV of padding behind a row is never read; later tokens overwrite it.

        Args:
            slots: rows in rising order. Other rows are not changed.
            counts: tokens of each row, which the model's input pads to the largest number.

        Returns:
            The caches and the slot of each row of the forward.

        Raises:
            InvariantBroken: when a row has no room for the padding, or cannot be shortened.
        """
        lengths = [self.length(slot) + count for slot, count in zip(slots, counts, strict=True)]
        view = self.decode(slots, max(counts))
        for slot, length in zip(slots, lengths, strict=True):
            self.roll_back(slot, length)
        return view

    def decode_tokens(
        self, slots: Sequence[int], counts: Sequence[int], repeated: Sequence[int]
    ) -> list[Any]:
        """Lengthen rows by different numbers of tokens, each of which is a row of the forward.

        Only where `writes_in_place`.

        Args:
            slots: rows in rising order. Other rows are not changed.
            counts: tokens of each row.
            repeated: indices of tokens that are repeated at the end of the forward's input.

        Returns:
            One cache per layer, passed to the model as `cache`.

        Raises:
            InvariantBroken: when a row has no room, or these rows are not written in place.
        """
        del counts, repeated
        raise InvariantBroken(f"the rows in slots {list(slots)} are not written in place")

    def roll_back(self, slot: int, length: int) -> None:
        """Shorten a row to `length` tokens.

        Raises:
            InvariantBroken: when the row is shorter or cannot be shortened.
        """
        raise InvariantBroken(f"slot {slot} cannot be cut to {length} tokens")

    @abc.abstractmethod
    def read_block(self, slot: int, start: int, stop: int) -> mx.array:
        """Copy the KV of tokens [start, stop) of a row into one block.

        The caller must evaluate the result before it builds the next forward. Until then it refers
        to the row's arrays, which the forward would have to copy instead of writing in place.

        Args:
            slot: the row.
            start: first token.
            stop: the token after the last one.

        Returns:
            uint8 [layout.block_bytes(stop - start)].

        Raises:
            InvariantBroken: when the row does not hold these tokens.
        """

    def read_blocks(self, slot: int, start: int, tokens: int, count: int) -> list[mx.array]:
        """Copy consecutive blocks of a row, like `read_block`.

        May wait for the copies, and so for all forwards built before.

        Args:
            slot: the row.
            start: first token of the first block.
            tokens: tokens per block.
            count: number of blocks.

        Returns:
            `count` arrays, uint8 [layout.block_bytes(tokens)].

        Raises:
            InvariantBroken: when the row does not hold these tokens.
        """
        firsts = range(start, start + count * tokens, tokens)
        return [self.read_block(slot, first, first + tokens) for first in firsts]

    def read_state(self, slot: int) -> CheckpointState:
        """Return a copy of a row's windows and recurrent state after all forwards built so far.

        The caller must start to compute its arrays together with the forward built last.

        Raises:
            InvariantBroken: when rows of this model have no state.
        """
        raise InvariantBroken(f"slot {slot} holds plain keys and values, there is no state")

    @abc.abstractmethod
    def fill_row(
        self,
        slot: int,
        length: int,
        blocks: Sequence[tuple[mx.array, int]],
        state: CheckpointState | None,
    ) -> None:
        """Fill an empty row from blocks; no other row is changed.

        Args:
            slot: the row.
            length: number of tokens in the row afterwards.
            blocks: (payload as returned by `read_block`, tokens in it), from the first token on;
                `length` tokens in total or, without a state, more.
            state: the state at `length` tokens; None when rows need none.

        Raises:
            InvariantBroken: when the row is not empty, or blocks and state do not match.
        """

    def early_layer_keys(self, share: float) -> mx.array | None:
        """Return the keys of an early layer, so that a forward can be started in two parts.

        Evaluating them runs the layers of the last forward before that layer, and not the others.

        Args:
            share: fraction of all layers that the evaluation runs, 0 to 1; at least one layer.

        Returns:
            Keys [rows, kv_heads, tokens, head_dim]; None when the model has very few layers, the
            array is unknown, or kernels write the rows in place.
        """
        del share
        return None

    @abc.abstractmethod
    def marker(self) -> mx.array:
        """Return a scalar, shape [], whose evaluation runs all forwards built so far.

        Callers evaluate it when a forward has no other output. It depends on all KV that the
        forwards write, and has memory of its own.
        """

    def _lengthen(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        for slot, count in zip(slots, counts, strict=True):
            length = self._lengths[slot] + count
            if length > self.row_tokens:
                raise InvariantBroken(
                    f"slot {slot} would hold {length} tokens, rows have room for {self.row_tokens}"
                )
            self._lengths[slot] = length
