"""Routed experts of few tokens, on CUDA. Owns how assignments share groups of threads.

A pair of a token and an expert that it is routed to is called an assignment. Its number is
token * experts per token + the expert's place among the token's. All assignments of an expert are
multiplied at once, so its weights are read once. Experts of other ranks are not computed.
"""

from typing import Any

import mlx.core as mx

from services.rank_worker.model.fast_path.kernels.dialects import make_kernel
from services.rank_worker.model.fast_path.kernels.matrices import (
    PACKED_HEADER,
    Matrix,
    PackedMatrix,
    matrix_of,
)
from services.rank_worker.model.fast_path.kernels.tensor_cores import (
    HEADER,
    OUTPUTS,
    TENSOR_TILE_ROWS,
    multiplies,
)

TOKENS_MAX = 256
"""Most tokens for which the kernels are faster."""
ASSIGNMENTS_MAX = 2_048
"""Most assignments that one group of threads sorts."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Matrices of a layer of experts."""
_THREADS = 1_024
_WARPS = 4


def sorting_constants(local: range, threads: int) -> list[tuple[str, int]]:
    """Return the constants of kernels that sort assignments.

    Args:
        local: experts whose weights this rank has.
        threads: of the kernel's one group.
    """
    sizes = [("ASSIGNMENTS_MAX", ASSIGNMENTS_MAX), ("THREADS", threads)]
    return [("FIRST", local.start), ("COUNT", len(local)), *sizes]


def tokens_dtype(layer: Any) -> mx.Dtype | None:
    """Return the type of tokens that a layer multiplies; None: any that its matrices do."""
    dtypes = (matrix_of(layer[name]).dtype for name in PROJECTIONS)
    return next(filter(None, dtypes), None)


class FewExperts:
    """Starts the kernels for layers of experts. Compiled kernels are kept by MLX."""

    def __init__(self) -> None:
        """Prepare; nothing is compiled yet."""
        self._group = make_kernel(
            "cuda", "experts/group_experts", ["experts"], ["groups"], header=HEADER
        )
        names = ["rows", "weight", "up", "experts", "groups"]
        self._products = make_kernel(
            "cuda", "experts/expert_products", names, ["product"], header=HEADER
        )
        arrays = ["weight", "scales", "biases", "up", "up_scales", "up_biases"]
        self._packed_products = make_kernel(
            "cuda",
            "experts/packed_expert_products",
            ["rows", *arrays, "experts", "groups"],
            ["product"],
            header=PACKED_HEADER,
        )

    def takes(self, layer: Any, x: mx.array, experts_per_token: int) -> bool:
        """Tell whether the kernels compute a layer for tokens [..., dim]: few, and of its dtype."""
        tokens = x.size // x.shape[-1]
        is_small = tokens <= TOKENS_MAX and tokens * experts_per_token <= ASSIGNMENTS_MAX
        dtype = tokens_dtype(layer)
        return is_small and (multiplies(x.dtype) if dtype is None else bool(x.dtype == dtype))

    def __call__(
        self,
        layer: Any,
        x: mx.array,
        indices: mx.array,
        local: range,
        groups: mx.array | None = None,
    ) -> mx.array:
        """Compute down(silu(gate(x)) * up(x)) of each token's experts.

        Args:
            layer: has the `PROJECTIONS` of the local experts, with which kernels can multiply; gate
                and up have equal constants.
            x: [tokens, dim], which it `takes`.
            indices: integer [tokens, k], experts of the whole model.
            local: those whose weights the layer has.
            groups: the result of `sort` for these, if it is known.

        Returns:
            [tokens, k, dim]; zeros for experts that are not local.
        """
        if groups is None:
            groups = self.sort(indices, local)
        gate, up, down = (matrix_of(layer[name]) for name in PROJECTIONS)
        product = self._multiply(x, gate, up, indices, groups, local.start)
        return self._multiply(product, down, None, indices, groups, local.start)

    def sort(self, experts: mx.array, local: range) -> mx.array:
        """Return the assignments sorted by expert, and where those of each expert begin.

        Args:
            experts: integer [tokens, k], of the whole model.
            local: those whose weights this rank has.

        Returns:
            int32 [2 * tokens * k + 1], see the kernel `sort_assignments`.
        """
        groups: mx.array
        (groups,) = self._group(
            inputs=[experts],
            template=sorting_constants(local, _THREADS),
            grid=(_THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(2 * experts.size + 1,)],
            output_dtypes=[mx.int32],
        )
        return groups

    def _multiply(
        self,
        rows: mx.array,
        matrix: Matrix,
        up: Matrix | None,
        experts: mx.array,
        groups: mx.array,
        first: int,
    ) -> mx.array:
        """Multiply the row of each assignment with the matrices of its expert.

        Args:
            rows: [tokens, inputs] with `up`, else [tokens, k, inputs].
            matrix: those of the local experts, [experts, outputs, inputs].
            up: like `matrix`: the result is silu(rows * matrix^T) * (rows * up^T).
            experts: integer [tokens, k], of the whole model.
            groups: the assignments sorted by expert.
            first: the first local expert.

        Returns:
            [tokens, k, outputs].
        """
        (tokens, per_token), (count, width, _) = experts.shape, matrix.weight.shape
        kernel = self._packed_products if isinstance(matrix, PackedMatrix) else self._products
        # The group that writes zeros is needed even where all experts are local: a number that is
        # no expert must not leave memory unset.
        group_count = min(experts.size, count) + (up is None)
        product: mx.array
        (product,) = kernel(
            inputs=[rows, *matrix.arrays, *(up or matrix).arrays, experts, groups],
            template=[
                *(("T", rows.dtype), ("R", rows.dtype)),
                *matrix.constants,
                ("FIRST", first),
                ("SHARING", 1 if up is None else per_token),
                ("ROW_TILES", 1 if tokens <= TENSOR_TILE_ROWS else 2),
                ("WARPS", _WARPS),
                ("GATED", up is not None),
                ("HAS_BIAS", False),
            ],
            grid=(-(-width // OUTPUTS) * _WARPS * 32, group_count, 1),
            threadgroup=(_WARPS * 32, 1, 1),
            output_shapes=[(tokens, per_token, width)],
            output_dtypes=[rows.dtype],
        )
        return product
