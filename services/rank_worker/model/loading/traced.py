"""What is known of an array in a model's graph: which stored bytes it is, cast how."""

import dataclasses
import math

import mlx.core as mx

from services.rank_worker.model.loading.strided import Strided, reinterpreted


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """Stored numbers in another order, then cast."""

    array: Strided
    dtype: mx.Dtype
    """What the stored bytes are."""
    casts: tuple[mx.Dtype, ...]
    """What they are cast to, one after the other."""

    def moved(self, array: Strided | None) -> "Traced | None":
        """Return the same numbers in another order."""
        return None if array is None else dataclasses.replace(self, array=array)

    def cast(self, dtype: mx.Dtype) -> "Traced":
        """Return the numbers as another type."""
        return dataclasses.replace(self, casts=(*self.casts, dtype))

    def viewed(self, dtype: mx.Dtype) -> "Traced | None":
        """Return the bytes as another type; None where they have been cast before."""
        array = None if self.casts else reinterpreted(self.array, dtype.size)
        return None if array is None else Traced(array, dtype, ())

    @property
    def final_dtype(self) -> mx.Dtype:
        """The type after all casts."""
        return self.casts[-1] if self.casts else self.dtype

    @property
    def stored_bytes(self) -> int:
        """Bytes of the numbers as they are stored."""
        return math.prod(self.array.shape) * self.array.item_bytes
