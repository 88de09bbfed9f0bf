"""An MLP down(silu(gate(x)) * up(x)) in two or three operations."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from services.rank_worker.model.fast_path.kernels.kernels import Kernels
from services.rank_worker.model.fast_path.merged_linear import (
    MergedLinear,
    can_merge,
    single_product,
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
        self, x: mx.array, *, invariant: bool = False, leaves_summand: bool = False
    ) -> mx.array:
        """Build the MLP.

        Args:
            x: [tokens, dim].
            invariant: a token's result must not depend on the others.
            leaves_summand: return this rank's summand, where the MLP is divided.

        Returns:
            [tokens, dim], summed over ranks where the MLP is divided, unless `leaves_summand`.
        """
        product = self._gate_up.gate(x, invariant=invariant)
        if product is None:
            gate_up = self._gate_up(x, invariant=invariant)
            if self._kernels is not None:
                product = self._kernels.silu_product(gate_up)
            else:
                product = swiglu(*mx.split(gate_up, 2, axis=-1))
        if leaves_summand:
            return self._down.own_part(product, invariant=invariant)
        return self._down(product, invariant=invariant)

    @property
    def is_divided(self) -> bool:
        """Whether the result is a sum over ranks."""
        return self._down.is_divided

    def compile(self, *, invariant: bool) -> None:
        """Have the kernels of the products compiled; `invariant` as for a call."""
        self._gate_up.compile(gated=True, invariant=invariant)
        self._down.compile(invariant=invariant)

    @property
    def has_plain_matrices(self) -> bool:
        """See `LayerStack`."""
        return self._down.can_be_invariant
