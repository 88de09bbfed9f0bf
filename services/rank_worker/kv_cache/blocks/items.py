"""Blocks and checkpoints in memory and on the way to files. Imports no MLX."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    # Only for annotations: threads that read and write files need no MLX.
    import mlx.core as mx

ItemKind = Literal["block", "checkpoint"]


@dataclasses.dataclass(frozen=True, slots=True)
class SpillItem:
    """A resident block or checkpoint that is to be written to a file."""

    hash: bytes
    kind: ItemKind
    tokens: int
    """Tokens in a block, or tokens before a checkpoint's state."""
    payload: memoryview
    """Format "B", C-contiguous, computed, and owns its memory. Reading it does not call MLX."""


@dataclasses.dataclass(frozen=True, slots=True)
class CachedItem:
    """A block or checkpoint in this rank's memory: resident, or restored from a file and checked.

    Immutable, so rows and spills may share it.
    """

    hash: bytes
    kind: ItemKind
    tokens: int
    """As in `SpillItem`."""
    payload: mx.array
    """uint8 [bytes] with memory of its own."""
