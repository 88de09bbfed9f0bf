"""Routed experts of few tokens, on CUDA. Owns the choice of how pairs share groups of threads.

Each token is multiplied with the matrices of the experts that it is routed to. A pair of a token
and an expert has the number token * experts per token + rank of the expert. All pairs of an expert
are multiplied at once, so its weights are read once. Experts of other ranks are not computed.
"""

import dataclasses
from typing import Any

import mlx.core as mx

from services.rank_worker.model.fast_path.kernels.dialects import CUDA, read_source
from services.rank_worker.model.fast_path.kernels.tensor_cores import DTYPES, HEADER

TOKENS_MAX = 256
"""Most tokens for which the kernels are faster."""
_PAIRS_MAX = 2_048
_GROUP_THREADS = 1_024
_OUTPUTS = 16
"""Outputs of a group of threads."""
_TILE_ROWS = 8
_CHUNK = 32
"""Inputs of which a warp reads at a time; they must divide those of a matrix."""
_WARPS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs of a token and an expert, in the order of tokens."""

    experts: mx.array
    """integer [pairs], of the whole model."""
    groups: mx.array
    """The result of the kernel `group_experts`."""
    local: range
    """Experts whose weights this rank has."""
    slots: int
    """Experts of each token."""


class FewExperts:
    """Starts the kernels for layers of experts. Compiled kernels are kept by MLX."""

    def __init__(self) -> None:
        """Prepare; nothing is compiled yet."""
        make: Any = mx.fast.cuda_kernel
        self._group = make(
            name="lockstep_group_experts",
            input_names=["experts"],
            output_names=["groups"],
            source=CUDA.prologue + read_source("group_experts"),
            header=HEADER,
        )
        self._products = make(
            name="lockstep_expert_products",
            input_names=["rows", "weight", "up", "experts", "groups"],
            output_names=["product"],
            source=CUDA.prologue + read_source("expert_products"),
            header=HEADER,
        )

    def takes(self, layer: Any, x: mx.array, experts_per_token: int) -> bool:
        """Tell whether the kernels compute a layer for tokens [..., dim]: few, and of its dtype."""
        tokens = x.size // x.shape[-1]
        is_small = tokens <= TOKENS_MAX and tokens * experts_per_token <= _PAIRS_MAX
        return is_small and bool(x.dtype == layer["gate_proj"].weight.dtype)

    def __call__(self, layer: Any, x: mx.array, indices: mx.array, local: range) -> mx.array:
        """Compute down(silu(gate(x)) * up(x)) of each token's experts.

        Args:
            layer: has `gate_proj`, `up_proj` and `down_proj` with the weights of the local experts,
                for which `can_multiply` holds.
            x: [tokens, dim] in the dtype of the weights.
            indices: integer [tokens, k], experts of the whole model.
            local: those whose weights the layer has.

        Returns:
            [tokens, k, dim]; zeros for experts that are not local.
        """
        tokens, slots = indices.shape
        experts = indices.reshape(-1)
        pairs = _Pairs(experts, self._sort(experts, local), local, slots)
        gate, up, down = (layer[name].weight for name in ("gate_proj", "up_proj", "down_proj"))
        product = self._multiply(x, gate, up, pairs)
        product = self._multiply(product, down, None, pairs)
        return product.reshape(tokens, slots, -1)

    def _sort(self, experts: mx.array, local: range) -> mx.array:
        """Return the pairs sorted by expert, and where the pairs of each expert begin."""
        groups: mx.array
        (groups,) = self._group(
            inputs=[experts],
            template=[
                *(("FIRST", local.start), ("COUNT", len(local))),
                *(("PAIRS_MAX", _PAIRS_MAX), ("THREADS", _GROUP_THREADS)),
            ],
            grid=(_GROUP_THREADS, 1, 1),
            threadgroup=(_GROUP_THREADS, 1, 1),
            output_shapes=[(2 * experts.size + 1,)],
            output_dtypes=[mx.int32],
        )
        return groups

    def _multiply(
        self,
        rows: mx.array,
        weight: mx.array,
        up: mx.array | None,
        pairs: _Pairs,
    ) -> mx.array:
        """Multiply the row of each pair with the matrices of its expert.

        Args:
            rows: [tokens, inputs] with `up`, else [pairs, inputs].
            weight: [experts, outputs, inputs].
            up: like `weight`: the result is silu(rows * weight^T) * (rows * up^T).
            pairs: of tokens and experts.

        Returns:
            [pairs, outputs].
        """
        count, width = pairs.experts.size, weight.shape[1]
        # Also where all experts are local: a number that is no expert must not leave memory unset.
        fills = up is None
        tokens = count // pairs.slots
        product: mx.array
        (product,) = self._products(
            inputs=[rows, weight, weight if up is None else up, pairs.experts, pairs.groups],
            template=[
                ("T", weight.dtype),
                ("FIRST", pairs.local.start),
                ("SLOTS", 1 if up is None else pairs.slots),
                ("ROW_TILES", 1 if tokens <= _TILE_ROWS else 2),
                ("WARPS", _WARPS),
                ("GATED", up is not None),
                ("HAS_BIAS", False),
                ("FILLS", fills),
            ],
            grid=(-(-width // _OUTPUTS) * _WARPS * 32, min(count, len(pairs.local)) + fills, 1),
            threadgroup=(_WARPS * 32, 1, 1),
            output_shapes=[(count, width)],
            output_dtypes=[weight.dtype],
        )
        return product


def can_multiply(weight: mx.array) -> bool:
    """Tell whether the kernels multiply with matrices of experts.

    Args:
        weight: [experts, outputs, inputs].
    """
    return weight.dtype in DTYPES and weight.shape[2] % _CHUNK == 0
