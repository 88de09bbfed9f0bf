"""What the executor asks of the KV of running sequences, however the arrays lie."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx


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

    def free(self, slot: int) -> None:
        """Empty a row."""
        ...

    def move(self, slot: int, target: int) -> None:
        """Move a row to a free slot; no other row is copied."""
        ...

    def prefill(self, slot: int, count: int) -> list[Any]:
        """Lengthen one row by `count` tokens and return the caches for their forward."""
        ...

    def prefill_together(self, slots: Sequence[int], counts: Sequence[int]) -> list[Any]:
        """Fill several empty rows by one forward, right-padded to the longest.

        Args:
            slots: empty rows, each once.
            counts: tokens of each; the forward's input has `max(counts)` columns.
        """
        ...

    def decode(self, slots: Sequence[int], count: int) -> BatchView:
        """Lengthen these rows by `count` tokens each and return the view for their forward.

        Args:
            slots: rows in rising order. Others are neither changed nor lengthened.
            count: tokens per row: 1, or k + 1 to verify k drafts.
        """
        ...

    def roll_back(self, slot: int, length: int) -> None:
        """Shorten a row to `length` tokens."""
        ...

    def read_rows(self, slot: int, start: int, stop: int) -> list[tuple[mx.array, mx.array]]:
        """Copy tokens [start, stop) of a row.

        Returns:
            Per layer (keys, values), each [heads, stop - start, head_dim] in the model's dtype.
        """
        ...

    def write_rows(
        self, slot: int, start: int, layers: Sequence[tuple[mx.array, mx.array]]
    ) -> None:
        """Append to a row of length `start` what `read_rows` returned."""
        ...

    def marker(self) -> mx.array:
        """Return a small array that is computed once all KV is. It shares no memory with the KV."""
        ...
