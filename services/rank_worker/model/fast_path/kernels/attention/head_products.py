"""Products of one vector of each head with that head's matrix, on CUDA, in any number of rows.

MLX multiplies each row by itself, so it reads the matrices of all heads once per row; this kernel
reads them once per 32 rows. It reads vectors from where they stand, which needs no views of them.
"""

import mlx.core as mx

from services.rank_worker.model.fast_path.kernels.dialects import make_kernel
from services.rank_worker.model.fast_path.kernels.tensor_cores import (
    CHUNK,
    HEADER,
    OUTPUTS,
    TENSOR_TILE_ROWS,
)

ROWS_OF_KERNELS = (1, TENSOR_TILE_ROWS + 1, 2 * TENSOR_TILE_ROWS + 1)
"""Numbers of rows that have kernels of their own, up to the next one; the last has all above it."""
_WARPS_MAX = 4
"""Most warps of a group, as the matrix of one head is small."""


class HeadProducts:
    """Starts the kernel. Compiled kernels are kept by MLX."""

    def __init__(self) -> None:
        """Prepare; nothing is compiled yet."""
        self._kernel = make_kernel(
            "cuda", "latent/head_products", ["rows", "weight"], ["product"], header=HEADER
        )

    def multiply(self, rows: mx.array, weight: mx.array, head_stride: int) -> mx.array:
        """Multiply.

        A row's result does not depend on the other rows, nor on their number.

        Args:
            rows: [rows, ...] in the dtype of `weight`, row-contiguous: each row begins with the
                vectors of all heads, at multiples of 8 numbers.
            weight: [heads, outputs, inputs] for which `can_multiply` holds, row-contiguous.
            head_stride: numbers from the beginning of a head's vector to that of the next.

        Returns:
            [rows, heads, 1, outputs].
        """
        count = rows.shape[0]
        heads, width, inputs = weight.shape
        row_tiles = 2 ** sum(count >= least for least in ROWS_OF_KERNELS[1:])
        # A warp reads two chunks at once.
        warps = max(1, min(_WARPS_MAX, inputs // (2 * CHUNK)))
        product: mx.array
        (product,) = self._kernel(
            inputs=[rows, weight],
            template=[
                *(("T", weight.dtype), ("R", weight.dtype)),
                ("ROW_TILES", row_tiles),
                ("WARPS", warps),
                ("ROW_STRIDE", rows.size // count),
                ("HEAD_STRIDE", head_stride),
            ],
            grid=(
                -(-width // OUTPUTS) * warps * 32,
                -(-count // (row_tiles * TENSOR_TILE_ROWS)),
                heads,
            ),
            threadgroup=(warps * 32, 1, 1),
            output_shapes=[(count, heads, 1, width)],
            output_dtypes=[weight.dtype],
        )
        return product
