"""Rotary embeddings as tables of cosines and sines, one row per token, for all layers of a step.

A table is what the model's own module makes of the unit vector, so each kind of rotary embedding is
supported that rotates pairs of numbers.
"""

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

_PROBES = ((0, 1, 77), (4_001, 30_000, 5))
"""Positions at which a module is compared with its table."""
_TOLERANCE = 2e-5


@dataclasses.dataclass(frozen=True, slots=True)
class Rotation:
    """A rotary embedding: rotates pairs among the first numbers of each head."""

    rope: Any
    """mlx-lm's module."""
    head_dim: int
    width: int
    """Numbers of a head that are rotated."""
    is_traditional: bool
    """Pairs stand beside each other, not half of `width` apart."""

    def table(self, offset: int | mx.array, count: int, rows: int) -> mx.array:
        """Return cosines and sines for new tokens.

        Args:
            offset: position of each row's first new token: of all rows, or int32 [rows].
            count: new tokens per row.
            rows: number of rows.

        Returns:
            float32 [rows, 1, count, width]: cosines of all pairs, then sines.
        """
        unit = np.zeros((self.head_dim,), dtype=np.float32)
        if self.is_traditional:
            unit[: self.width : 2] = 1.0
        else:
            unit[: self.width // 2] = 1.0
        # Some modules change their argument, so it must be a new array. MLX 0.32 on CUDA rotates
        # arrays wrongly that repeat their rows in memory.
        units = mx.contiguous(mx.broadcast_to(mx.array(unit), (rows, 1, count, self.head_dim)))
        table: mx.array = self.rope(units, offset=offset)
        if self.width < self.head_dim:
            # Kernels read rows of `width` numbers, one after the other.
            table = mx.contiguous(table[..., : self.width])
        if self.is_traditional:
            pairs = table.reshape(rows, 1, count, self.width // 2, 2)
            table = pairs.swapaxes(-1, -2).reshape(rows, 1, count, self.width)
        return table

    def rotate(self, x: mx.array, table: mx.array) -> mx.array:
        """Rotate heads.

        Args:
            x: [rows, heads, count, head_dim].
            table: result of `table` for these tokens.

        Returns:
            Like `x`; computed in float32.
        """
        half = self.width // 2
        cosines, sines = table[..., :half], table[..., half:]
        rotated = x if self.width == self.head_dim else x[..., : self.width]
        if self.is_traditional:
            pairs = rotated.reshape(*rotated.shape[:-1], half, 2)
            one, other = pairs[..., 0], pairs[..., 1]
        else:
            one, other = mx.split(rotated, 2, axis=-1)
        results = [one * cosines - other * sines, one * sines + other * cosines]
        if self.is_traditional:
            joined = mx.stack(results, axis=-1).reshape(rotated.shape)
        else:
            joined = mx.concatenate(results, axis=-1)
        joined = joined.astype(x.dtype)
        if self.width == self.head_dim:
            return joined
        return mx.concatenate([joined, x[..., self.width :]], axis=-1)

    def equals(self, other: "Rotation") -> bool:
        """Tell whether another one rotates all numbers by the same angles."""
        if (self.head_dim, self.width, self.is_traditional) != (
            other.head_dim,
            other.width,
            other.is_traditional,
        ):
            return False
        positions = mx.array(_PROBES[1], dtype=mx.int32)
        tables = [one.table(positions, 1, len(_PROBES[1])) for one in (self, other)]
        return bool(mx.array_equal(tables[0], tables[1]).item())

    def is_right_at(self, positions: tuple[int, ...]) -> bool:
        """Tell whether the module rotates as its table says, at some positions."""
        rows = len(positions)
        numbers = np.random.default_rng(1).standard_normal((rows, 2, 1, self.head_dim))
        x = mx.array(numbers.astype(np.float32))
        offset = mx.array(positions, dtype=mx.int32)
        try:
            expected = self.rope(x + 0.0, offset=offset)
            found = self.rotate(x, self.table(offset, 1, rows))
        except (TypeError, ValueError, IndexError):
            return False
        return bool((mx.abs(expected - found).max() < _TOLERANCE).item())


def read_rotation(rope: nn.Module, head_dim: int) -> Rotation | None:
    """Recognize a rotary embedding; None if it is no rotation of pairs.

    Args:
        rope: mlx-lm's module.
        head_dim: numbers per head.
    """
    named = getattr(rope, "dims", None) or getattr(rope, "dim", None)
    width = min(head_dim, named) if isinstance(named, int) else head_dim
    for is_traditional in (False, True):
        rotation = Rotation(rope, head_dim, width, is_traditional)
        if all(map(rotation.is_right_at, _PROBES)):
            return rotation
    return None
