"""Products of few rows with a matrix, on CUDA. Owns the choice of a group's threads.

MLX calls a library for such products, whose kernels it captures from a stream into a graph: that
takes the host 20 microseconds each, as long as the device needs to read a small matrix. This kernel
is encoded in 5 and reads matrices as fast. With more rows the library's kernels are faster. Packed
numbers have a kernel of the same kind.
"""

from collections.abc import Collection

import mlx.core as mx

from services.rank_worker.model.fast_path.kernels.dialects import make_kernel
from services.rank_worker.model.fast_path.kernels.faults import first_error
from services.rank_worker.model.fast_path.kernels.matrices import (
    PACKED_HEADER,
    Matrix,
    PackedMatrix,
    PlainMatrix,
)
from services.rank_worker.model.fast_path.kernels.tensor_cores import (
    CHUNK,
    HEADER,
    OUTPUTS,
    TENSOR_TILE_ROWS,
    multiplies,
)

FEW_ROWS_MAX = 16
"""Most rows of a product for which the kernel is faster."""
_GROUPS_ENOUGH = 264
"""Groups that keep all processors of a GPU busy; with fewer, each gets more warps."""


class FewRows:
    """Starts the kernel. Compiled kernels are kept by MLX."""

    def __init__(self) -> None:
        """Prepare; nothing is compiled yet."""
        self._kernel = make_kernel(
            "cuda", "few_rows", ["rows", "weight", "bias"], ["product"], header=HEADER
        )
        self._packed_kernel = make_kernel(
            "cuda",
            "packed_few_rows",
            ["rows", "weight", "scales", "biases", "bias"],
            ["product"],
            header=PACKED_HEADER,
        )

    def find_fault(self, dtype: mx.Dtype, bits: Collection[int] = ()) -> str:
        """Compile and run the kernels once; return why they cannot serve, "" if they can.

        Args:
            dtype: of the model.
            bits: of its affine packed matrices.
        """
        if not multiplies(dtype):
            return f"no product of few rows for {dtype}"
        numbers = mx.zeros((OUTPUTS, 4 * CHUNK), dtype=dtype)
        matrices: list[Matrix] = [PlainMatrix(numbers)]
        for one in bits:
            weight, scales, biases = mx.quantize(numbers, CHUNK, one)
            matrices.append(PackedMatrix(weight, scales, biases, CHUNK, one, "affine"))
        fault = first_error(
            lambda matrix: mx.eval(self.multiply(numbers[:1], matrix, None)),
            (one for one in matrices if one.can_multiply),
        )
        return f"the product of few rows does not run ({fault})" if fault else ""

    def multiply(
        self,
        rows: mx.array,
        matrix: Matrix,
        bias: mx.array | None,
        *,
        gated: bool = False,
        dtype: mx.Dtype | None = None,
    ) -> mx.array:
        """Compute rows * matrix^T + bias.

        A row's result does not depend on the other rows, nor on their number.

        Args:
            rows: [any number, inputs] in the dtype of the matrix.
            matrix: [outputs, inputs], which `can_multiply`.
            bias: [outputs] in this dtype, or None.
            gated: the outputs are gate, then up; the result is silu(gate) * up.
            dtype: of the product; None: that of the rows. Sums are float32.

        Returns:
            [rows, outputs], or [rows, outputs / 2] if gated.
        """
        row_count, outputs = rows.shape[0], matrix.weight.shape[0]
        is_packed = isinstance(matrix, PackedMatrix)
        width = outputs // 2 if gated else outputs
        groups = -(-width // OUTPUTS)
        warps = _warps(groups, gated=gated, is_packed=is_packed)
        row_tiles = 1
        while row_tiles * TENSOR_TILE_ROWS < min(row_count, 4 * TENSOR_TILE_ROWS):
            row_tiles *= 2
        product: mx.array
        (product,) = (self._packed_kernel if is_packed else self._kernel)(
            inputs=[rows, *matrix.arrays, rows if bias is None else bias],
            template=[
                *(("T", rows.dtype), ("R", dtype or rows.dtype)),
                *matrix.constants,
                ("ROW_TILES", row_tiles),
                ("WARPS", warps),
                ("GATED", gated),
                ("HAS_BIAS", bias is not None),
            ],
            grid=(groups * warps * 32, -(-row_count // (row_tiles * TENSOR_TILE_ROWS)), 1),
            threadgroup=(warps * 32, 1, 1),
            output_shapes=[(row_count, width)],
            output_dtypes=[dtype or rows.dtype],
        )
        return product


def _warps(groups: int, *, gated: bool, is_packed: bool) -> int:
    """Return the warps of each group: more where groups are few, fewer where each reads twice."""
    if gated:
        return 4
    # The registers that threads unpack in are not enough for more of them, nor are the chunks.
    return 16 if groups < _GROUPS_ENOUGH and not is_packed else 8
