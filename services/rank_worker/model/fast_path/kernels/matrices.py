"""Matrices that kernels of CUDA's tensor cores multiply with: plain ones, and of packed numbers.

Packed numbers are those of `mx.quantize`. A kernel unpacks them in registers, to numbers of the
rows' type. Integers of up to 8 bits and small floats are exact in it; the product with their scale,
plus their bias, is rounded once.
"""

import dataclasses
from typing import Any, Self

import mlx.core as mx

from services.rank_worker.model.fast_path.kernels.dialects import read_source
from services.rank_worker.model.fast_path.kernels.tensor_cores import (
    CHUNK,
    HEADER,
    can_multiply,
    multiplies,
)

PACKED_HEADER = HEADER + read_source("products/unpack")
"""Definitions before the function of a kernel that unpacks."""
_WORDS_MAX = 4
"""Most words that a thread reads at once."""
_PARTS = 4
"""Threads that share the inputs of an output."""
_GROUP_SIZES = {
    ("affine", 4): (32, 64, 128),
    ("affine", 8): (32, 64, 128),
    ("mxfp4", 4): (32,),
    ("mxfp8", 8): (32,),
    ("nvfp4", 4): (16,),
}
"""Inputs that have one scale, for the modes and the bits that the kernels know."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A matrix, or one per expert, of numbers of the rows' type."""

    weight: mx.array
    """[..., outputs, inputs]."""

    @property
    def arrays(self) -> list[mx.array]:
        """What a kernel is given."""
        return [self.weight]

    @property
    def constants(self) -> list[tuple[str, Any]]:
        """What a kernel's template is given."""
        return []

    @property
    def dtype(self) -> mx.Dtype | None:
        """Type of the rows that it is multiplied with."""
        return self.weight.dtype

    @property
    def can_multiply(self) -> bool:
        """Whether kernels multiply with it."""
        return can_multiply(self.weight)

    @property
    def inputs(self) -> int:
        """Numbers of a row that it is multiplied with."""
        return int(self.weight.shape[-1])


@dataclasses.dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix, or one per expert, as `mx.quantize` returns it."""

    weight: mx.array
    """uint32 [..., outputs, inputs * bits / 32]."""
    scales: mx.array
    """[..., outputs, inputs / group size]: of the rows' type for integers, else uint8."""
    biases: mx.array | None
    """Like `scales`, for integers."""
    group_size: int
    bits: int
    mode: str

    @classmethod
    def of(cls, module: Any) -> Self:
        """Return that of a module with quantized weights."""
        arrays = module.weight, module.scales, module.get("biases")
        return cls(*arrays, module.group_size, module.bits, module.mode)

    @property
    def arrays(self) -> list[mx.array]:
        """What a kernel is given: weight, scales and biases, or others in their place."""
        return [self.weight, self.scales, self.scales if self.biases is None else self.biases]

    @property
    def constants(self) -> list[tuple[str, Any]]:
        """What a kernel's template is given."""
        return [
            *(("S", self.scales.dtype), ("BITS", self.bits), ("GROUP", self.group_size)),
            *(("WORDS", self._words), ("FLOATS", self.mode != "affine")),
        ]

    @property
    def dtype(self) -> mx.Dtype | None:
        """Type of the rows that it is multiplied with; None: any of 16 bits."""
        return self.scales.dtype if self.mode == "affine" else None

    @property
    def can_multiply(self) -> bool:
        """Whether kernels multiply with it."""
        return (
            self.group_size in _GROUP_SIZES.get((self.mode, self.bits), ())
            and self.inputs % CHUNK == 0
            and (self.dtype is None or multiplies(self.dtype))
        )

    @property
    def inputs(self) -> int:
        """Numbers of a row that it is multiplied with."""
        return int(self.scales.shape[-1]) * self.group_size

    @property
    def _words(self) -> int:
        """Words that a thread reads at once: of one group, and all of a warp divide the inputs."""
        words, per_word = _WORDS_MAX, 32 // self.bits
        while words * per_word > self.group_size or self.inputs % (words * per_word * _PARTS):
            words //= 2
        return words


Matrix = PlainMatrix | PackedMatrix


def matrix_of(module: Any) -> Matrix:
    """Return the matrix of a module of mlx or mlx-lm, or its matrices, one per expert."""
    return PackedMatrix.of(module) if "scales" in module else PlainMatrix(module.weight)
