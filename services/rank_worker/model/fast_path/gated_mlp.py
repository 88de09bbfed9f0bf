"""An MLP down(silu(gate(x)) * up(x)) in two or three operations."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from services.rank_worker.model.fast_path.kernels.few_rows import FewRows
from services.rank_worker.model.fast_path.kernels.kernels import Kernels
from services.rank_worker.model.fast_path.merged_linear import (
    MergedLinear,
    SummedLinear,
    can_merge,
    can_sum,
)

_MATRICES = {"gate_proj", "up_proj", "down_proj"}


def has_gated_matrices(mlp: Any) -> bool:
    """Tell whether a module consists of these matrices, gate and up of one kind."""
    return set(mlp.children()) == _MATRICES and can_merge([mlp.gate_proj, mlp.up_proj])


class GatedMlp:
    """Computes an MLP. What its activation is cannot be seen from outside; the proof finds it."""

    def __init__(self, mlp: Any, kernels: Kernels | None) -> None:
        """Merge gate and up; waits for the device.

        Args:
            mlp: a module for which `has_gated_matrices` holds, with its weights in memory.
            kernels: of the device; None: MLX's operations are used.
        """
        self._kernels = kernels
        few_rows = kernels.few_rows if kernels is not None else None
        self._gate_up = MergedLinear([mlp.gate_proj, mlp.up_proj], few_rows)
        self._down = single_product(mlp.down_proj, few_rows)

    def __call__(
        self, x: mx.array, *, apart: bool = False, leaves_summand: bool = False
    ) -> mx.array:
        """Build the MLP.

        Args:
            x: [tokens, dim].
            apart: a token's result must not depend on the others.
            leaves_summand: return this rank's summand, where the MLP is divided.

        Returns:
            [tokens, dim], summed over ranks where the MLP is divided, unless `leaves_summand`.
        """
        product = self._gate_up.gate(x, apart=apart)
        if product is None:
            gate_up = self._gate_up(x, apart=apart)
            if self._kernels is not None:
                product = self._kernels.silu_product(gate_up)
            else:
                product = swiglu(*mx.split(gate_up, 2, axis=-1))
        down = self._down
        if leaves_summand and isinstance(down, SummedLinear):
            down = down.part
        found: mx.array = down(product, apart=True) if apart else down(product)
        return found

    @property
    def is_divided(self) -> bool:
        """Whether the result is a sum over ranks."""
        return isinstance(self._down, SummedLinear)

    def compile(self, *, apart: bool) -> None:
        """Have the kernels of the products compiled; `apart` as for a call."""
        self._gate_up.compile(gated=True, apart=apart)
        compile_product(self._down, apart=apart)

    @property
    def has_plain_matrices(self) -> bool:
        """See `LayerStack`."""
        return isinstance(self._down, MergedLinear | SummedLinear)


def single_product(module: Any, few_rows: FewRows | None) -> Any:
    """Return a matrix whose product is one operation, and a sum if it is divided by its inputs.

    Args:
        module: one matrix, whole or divided over ranks.
        few_rows: multiplies few rows, where it can; None: MLX multiplies all.
    """
    if can_sum(module):
        return SummedLinear(module, few_rows)
    return MergedLinear([module], few_rows) if can_merge([module]) else module


def compile_product(product: Any, *, apart: bool) -> None:
    """Have the kernels of a result of `single_product` compiled; `apart` as for a product."""
    part = product.part if isinstance(product, SummedLinear) else product
    if isinstance(part, MergedLinear):
        part.compile(apart=apart)
