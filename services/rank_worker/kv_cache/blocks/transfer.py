"""Blocks and checkpoints on their way between memory and files."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    # Only the type: who moves bytes to and from files needs no MLX.
    import mlx.core as mx

Kind = Literal["block", "checkpoint"]


@dataclasses.dataclass(frozen=True, slots=True)
class SpillItem:
    """A resident block or checkpoint on its way to a file."""

    hash: bytes
    kind: Kind
    tokens: int
    """Of a block: how many it holds. Of a checkpoint: at how many tokens its state stands."""
    payload: memoryview
    """Format "B", C-contiguous, computed; keeps its memory alive. Reading it calls nothing of
    MLX."""


@dataclasses.dataclass(frozen=True, slots=True)
class RestoredItem:
    """A block or checkpoint that was read from a file and verified."""

    hash: bytes
    kind: Kind
    tokens: int
    """As in `SpillItem`."""
    payload: mx.array
    """uint8 [bytes]."""
