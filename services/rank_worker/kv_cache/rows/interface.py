"""What the executor asks of the KV of running sequences, however the arrays lie."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from services.rank_worker.kv_cache.rows.block_layout import BlockLayout
from services.rank_worker.kv_cache.rows.checkpoint_state import CheckpointState


@dataclasses.dataclass(frozen=True, slots=True)
class BatchView:
    """What one batched forward needs: caches, and which slot each of its rows belongs to."""

    caches: list[Any]
    """One object per layer, handed to the model as `cache`."""
    input_slots: list[int]
    """Slot of each row of the model's input. Some may be holes: any token will do for them."""
    output_rows: list[int] | None
    """Row of the model's output for each slot asked for; None when they are the same list."""


class KVStore(Protocol):
    """KV by slot. Lengths live on the host: plans alone determine them."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one row takes, all layers."""
        ...

    @property
    def bytes_per_row(self) -> int:
        """Bytes that one row takes whatever its length."""
        ...

    @property
    def can_roll_back(self) -> bool:
        """Whether a row can be shortened, so that drafts can be verified."""
        ...

    @property
    def can_pad(self) -> bool:
        """Whether several fresh rows may be prefilled in one right-padded forward."""
        ...

    @property
    def layout(self) -> BlockLayout | None:
        """How blocks lie; None: rows of this model cannot be rebuilt from anything kept."""
        ...

    @property
    def layout_text(self) -> str:
        """Layout of blocks and states in words; "" without a layout."""
        ...

    @property
    def needs_state(self) -> bool:
        """Whether a row is rebuilt from blocks only together with a state at their end."""
        ...

    @property
    def row_count(self) -> int:
        """Rows that there are: slots 0 to row_count - 1."""
        ...

    @property
    def row_tokens(self) -> int:
        """Tokens that each row has room for."""
        ...

    def length(self, slot: int) -> int:
        """Return how many tokens the row holds."""
        ...

    def resize(self, row_count: int, row_tokens: int) -> None:
        """Make room for exactly so many rows of so many tokens; what the rows hold stays."""
        ...

    def resize_waits(self, row_count: int, row_tokens: int) -> bool:
        """Tell whether `resize` to this waits for all that was started before."""
        ...

    def free(self, slot: int) -> None:
        """Empty a row."""
        ...

    def move(self, slot: int, target: int) -> None:
        """Move a row to a free slot; no other row is copied."""
        ...

    def prefill(self, slot: int, count: int, columns: int = 0) -> list[Any]:
        """Lengthen one row by `count` tokens and return the caches for their forward.

        Args:
            slot: the row.
            count: tokens.
            columns: that the forward's input has, right-padded, where rows can be padded and have
                room for them; 0: as many as tokens.
        """
        ...

    def prefill_together(
        self, slots: Sequence[int], counts: Sequence[int], columns: int = 0
    ) -> list[Any]:
        """Fill several empty rows by one forward, right-padded to the longest.

        Args:
            slots: empty rows, each once.
            counts: tokens of each.
            columns: that the forward's input has; 0: as many as the longest has tokens.
        """
        ...

    def decode(self, slots: Sequence[int], count: int) -> BatchView:
        """Lengthen these rows by `count` tokens each and return the view for their forward.

        Args:
            slots: rows in rising order. Others are neither changed nor lengthened.
            count: tokens per row: 1, or k + 1 to verify k drafts. Rows with fewer drafts are
                padded, and rolled back to what is no padding.
        """
        ...

    def roll_back(self, slot: int, length: int) -> None:
        """Shorten a row to `length` tokens."""
        ...

    def read_block(self, slot: int, start: int, stop: int) -> mx.array:
        """Copy the KV of tokens [start, stop) of a row: uint8 [layout.block_bytes(stop - start)].

        The caller evaluates it before the next forward is built: until then it holds the arrays
        that the forward wants to write in place.
        """
        ...

    def read_blocks(self, slot: int, start: int, tokens: int, count: int) -> list[mx.array]:
        """Copy the KV of consecutive blocks of `tokens` each, from `start` on: see `read_block`.

        It may wait for them, and so for all forwards before.
        """
        ...

    def read_state(self, slot: int) -> CheckpointState:
        """Set the state of a row aside, as all forwards built so far leave it.

        Its arrays are to be started with what was built last.
        """
        ...

    def fill(
        self,
        slot: int,
        length: int,
        blocks: Sequence[tuple[mx.array, int]],
        state: CheckpointState | None,
    ) -> None:
        """Give an empty row its first tokens; no other row is touched.

        Args:
            slot: the row.
            length: tokens that it holds afterwards.
            blocks: (payload as from `read_block`, tokens that it holds) in order from the first
                token on; together `length` tokens or, where rows can be cut, more.
            state: at `length` tokens; None where rows need none.

        Raises:
            InvariantBroken: that is not what such a row is made of.
        """
        ...

    def first_layers(self, share: float) -> mx.array | None:
        """Return an array that the first layers of the forward built last compute.

        Args:
            share: the part of all layers, 0 to 1; one layer at least.

        Returns:
            None where one layer is no small part of the model, or which array that is cannot be
            known.
        """
        ...

    def marker(self) -> mx.array:
        """Return a small array that is computed once all KV is. It shares no memory with the KV."""
        ...
