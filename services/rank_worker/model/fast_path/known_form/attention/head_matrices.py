"""One matrix per head, as mlx-lm's latent attention has them.

B is the number of rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from services.rank_worker.model.fast_path.kernels.attention.head_products import (
    ROWS_OF_KERNELS,
    HeadProducts,
)
from services.rank_worker.model.fast_path.kernels.tensor_cores import can_multiply
from services.rank_worker.model.fast_path.unknown_form import UnknownForm


def head_shape(module: Any) -> tuple[int, int, int]:
    """Return (heads, outputs, inputs) of one matrix per head.

    Raises:
        UnknownForm: the module is something else.
    """
    heads, outputs, inputs = module.weight.shape
    if type(module) is QuantizedMultiLinear:
        return heads, outputs, inputs * 32 // module.bits
    if type(module) is MultiLinear:
        return heads, outputs, inputs
    raise UnknownForm(f"a matrix per head is a {type(module).__name__}")


class HeadMatrices:
    """Multiplies one vector of each head with that head's matrix. Owns the matrices."""

    def __init__(self, module: Any, products: HeadProducts | None) -> None:
        """Take the matrices; waits for the device.

        Args:
            module: one for which `head_shape` is known, with its weights in memory. It keeps them.
            products: multiplies rows of a decode, where it can; None: MLX does.
        """
        self._multiply: Callable[[mx.array], mx.array] = module
        self._products: HeadProducts | None = None
        # Of some of the heads, kernels would copy it in each step.
        self._weight = module.weight = mx.contiguous(module.weight)
        mx.eval(self._weight)
        if type(module) is MultiLinear:
            if can_multiply(module.weight):
                self._products = products
            # A view, once: otherwise each step would have nodes for it.
            matrices = module.weight.swapaxes(-1, -2)[None]
            mx.eval(matrices)
            self._multiply = functools.partial(_multiply_heads, matrices)
        self._heads, _, self._inputs = head_shape(module)

    def __call__(self, x: mx.array) -> mx.array:
        """Multiply: [B, heads, 1, inputs] -> [B, heads, 1, outputs]."""
        return self._multiply(x)

    def multiply_rows(self, x: mx.array, head_stride: int) -> mx.array:
        """Multiply rows of a decode.

        Args:
            x: [B, ...], row-contiguous: each row begins with the vectors of all heads.
            head_stride: numbers from the beginning of a head's vector to that of the next.

        Returns:
            [B, heads, 1, outputs].
        """
        rows = x.shape[0]
        if self._products is not None:
            return self._products.multiply(x, self._weight, head_stride)
        shape = (rows, self._heads, 1, self._inputs)
        if x.shape != shape:
            # MLX on CUDA copies a view whose last but one axis, of size 1, has another stride.
            x = mx.as_strided(x, shape, (x.size // rows, head_stride, self._inputs, 1))
        return self._multiply(x)

    def compile(self, row_width: int, head_stride: int) -> None:
        """Have the kernel compiled for all numbers of rows. Waits for the device.

        Args:
            row_width: numbers of a row of `multiply_rows`.
            head_stride: see there.
        """
        for rows in ROWS_OF_KERNELS if self._products is not None else ():
            x = mx.zeros((rows, row_width), dtype=self._weight.dtype)
            mx.eval(self.multiply_rows(x, head_stride))


def _multiply_heads(matrices: mx.array, x: mx.array) -> mx.array:
    return x @ matrices
