"""Products with the matrices of modules: of several with one input, a divided one, or any other.

The modules that held the weights get views of the merged ones, so that nothing is held twice and
mlx-lm's code, which uses these modules, still works.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx import nn
from mlx.nn.layers import distributed  # noqa: TID251  (types of divided matrices only)

from services.rank_worker.model.fast_path.kernels.few_rows import FEW_ROWS_MAX, FewRows
from services.rank_worker.model.fast_path.kernels.matrices import (
    Matrix,
    PackedMatrix,
    PlainMatrix,
)
from services.rank_worker.model.fast_path.row_tiles import multiply_in_tiles
from services.rank_worker.peers.collectives import sum_in_group

_KINDS = (
    nn.Linear,
    nn.QuantizedLinear,
    distributed.AllToShardedLinear,
    distributed.QuantizedAllToShardedLinear,
)
_SUMMED_KINDS = (distributed.ShardedToAllLinear, distributed.QuantizedShardedToAllLinear)
_ARRAYS = ("weight", "scales", "biases", "bias")
_QUANTIZATION = ("group_size", "bits", "mode")


def can_merge(modules: Sequence[Any]) -> bool:
    """Tell whether modules are matrices of one kind, with outputs that stand beside each other."""
    first = modules[0]
    return all(
        type(one) in _KINDS
        and type(one) is type(first)
        and set(one.children()) == set()
        and one.parameters().keys() == first.parameters().keys()
        and set(one.parameters()) <= set(_ARRAYS)
        and all(getattr(one, name, None) == getattr(first, name, None) for name in _QUANTIZATION)
        and all(array.dtype == first[name].dtype for name, array in one.parameters().items())
        for one in modules
    )


def packed_bits(model: nn.Module) -> set[int]:
    """Return the bits of the matrices of a model whose numbers are affine and packed."""
    kinds = (*_KINDS, *_SUMMED_KINDS)
    packed = [one for one in model.modules() if isinstance(one, kinds) and "scales" in one]
    return {int(one.bits) for one in packed if one.mode == "affine"}


class Product(Protocol):
    """Multiplies rows with a matrix."""

    @property
    def can_be_invariant(self) -> bool:
        """Whether it can be called with `invariant`: the matrix is whole, or its parts summed."""

    @property
    def is_divided(self) -> bool:
        """Whether a call sums over ranks, and `own_part` does not."""

    def __call__(self, x: mx.array, *, invariant: bool = False) -> mx.array:
        """Multiply, and sum over ranks if the matrix is divided.

        Args:
            x: [..., inputs].
            invariant: a row's product must not depend on the other rows, nor on their number.

        Returns:
            [..., outputs].
        """

    def own_part(self, x: mx.array, *, invariant: bool = False) -> mx.array:
        """Multiply as a call does, without a sum over ranks."""

    def compile(self, *, invariant: bool = False) -> None:
        """Have a kernel compiled for all numbers of rows that it takes. Waits for the device.

        Args:
            invariant: as for a call.
        """


def single_product(module: Any, few_rows: FewRows | None) -> Product:
    """Return the product with one matrix, in one operation if its kind is known.

    Args:
        module: one matrix, whole or divided over ranks, with its weights in memory.
        few_rows: multiplies few rows, where it can; None: MLX multiplies all.
    """
    if can_sum(module):
        return SummedLinear(module, few_rows)
    return MergedLinear([module], few_rows) if can_merge([module]) else ModuleProduct(module)


class MergedLinear:
    """The matrices of several modules as one: `x` -> the modules' outputs beside each other.

    Owns its weights.
    """

    can_be_invariant, is_divided = True, False

    def __init__(self, modules: Sequence[Any], few_rows: FewRows | None = None) -> None:
        """Merge the weights and replace those of the modules by views. Waits for the device.

        Args:
            modules: modules for which `can_merge` holds, with their weights in memory. For a moment
                the weights of these modules are held twice.
            few_rows: multiplies few rows, where it can; None: MLX multiplies all.
        """
        first = modules[0]
        self._arrays: dict[str, mx.array] = {}
        for name in first.parameters():
            self._arrays[name] = _merge(modules, name)
        self._quantization = {
            name: getattr(first, name) for name in _QUANTIZATION if hasattr(first, name)
        }
        self._matrix: Matrix
        if self._quantization:
            arrays = (self._arrays["weight"], self._arrays["scales"], self._arrays.get("biases"))
            self._matrix = PackedMatrix(*arrays, **self._quantization)
        else:
            self._matrix = PlainMatrix(self._arrays["weight"])
            # A view, once: otherwise each step would have a node for it.
            self._transposed = self._matrix.weight.T
            mx.eval(self._transposed)
        # Of small floats the rows' type, for which a kernel is compiled, is not known.
        dtype, bias = self._matrix.dtype, self._arrays.get("bias")
        has_kernel = dtype is not None and (bias is None or bias.dtype == dtype)
        self._few_rows = few_rows if has_kernel and self._matrix.can_multiply else None

    def __call__(self, x: mx.array, *, invariant: bool = False) -> mx.array:
        """See `Product`; the outputs are those of all modules."""
        if self._takes(x, invariant=invariant):
            assert self._few_rows is not None
            return self._few_rows.multiply(x, self._matrix, self._arrays.get("bias"))
        return multiply_in_tiles(self._multiply, x) if invariant else self._multiply(x)

    def own_part(self, x: mx.array, *, invariant: bool = False) -> mx.array:
        """See `Product`."""
        return self(x, invariant=invariant)

    def _multiply(self, x: mx.array) -> mx.array:
        arrays = self._arrays
        if not self._quantization:
            if "bias" in arrays:
                return mx.addmm(arrays["bias"], x, self._transposed)
            return x @ self._transposed
        product = mx.quantized_matmul(
            x,
            arrays["weight"],
            scales=arrays["scales"],
            biases=arrays.get("biases"),
            transpose=True,
            **self._quantization,
        )
        return product + arrays["bias"] if "bias" in arrays else product

    def gate(self, x: mx.array, *, invariant: bool = False) -> mx.array | None:
        """Compute silu(gate) * up in one operation, where a kernel takes that number of rows.

        Args:
            x: [rows, inputs]. The outputs are gate, then up.
            invariant: as for a call.

        Returns:
            [rows, outputs / 2]; None: there is no kernel for it.
        """
        if not self._takes(x, invariant=invariant):
            return None
        assert self._few_rows is not None
        return self._few_rows.multiply(x, self._matrix, self._arrays.get("bias"), gated=True)

    def compile(self, *, gated: bool = False, invariant: bool = False) -> None:
        """See `Product`.

        Args:
            gated: the kernel of `gate`.
            invariant: as for a call.
        """
        if self._few_rows is None:
            return
        matrix = self._matrix
        for rows in (1, FEW_ROWS_MAX, *([FEW_ROWS_MAX + 1] if invariant else [])):
            x = mx.zeros((rows, matrix.inputs), dtype=matrix.dtype)
            mx.eval(self.gate(x, invariant=invariant) if gated else self(x, invariant=invariant))

    def _takes(self, x: mx.array, *, invariant: bool) -> bool:
        is_small = x.ndim == 2 and (invariant or x.shape[0] <= FEW_ROWS_MAX)
        return self._few_rows is not None and is_small and bool(x.dtype == self._matrix.dtype)


def can_sum(module: Any) -> bool:
    """Tell whether a module is a matrix divided by its inputs, whose parts' products are summed."""
    return type(module) in _SUMMED_KINDS and "bias" not in module


class SummedLinear:
    """A matrix divided over ranks by its inputs."""

    can_be_invariant = is_divided = True

    def __init__(self, module: Any, few_rows: FewRows | None) -> None:
        """Take this rank's part.

        Args:
            module: one for which `can_sum` holds, with its weights in memory.
            few_rows: as for `MergedLinear`.
        """
        self._part = MergedLinear([module], few_rows)
        self._group = module.group

    def __call__(self, x: mx.array, *, invariant: bool = False) -> mx.array:
        """See `Product`; the inputs are this rank's."""
        return sum_in_group(self._part(x, invariant=invariant), self._group)

    def own_part(self, x: mx.array, *, invariant: bool = False) -> mx.array:
        """See `Product`."""
        return self._part(x, invariant=invariant)

    def compile(self, *, invariant: bool = False) -> None:
        """See `Product`."""
        self._part.compile(invariant=invariant)


class ModuleProduct:
    """A module of another kind, as it computes its product itself."""

    can_be_invariant = is_divided = False

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, x: mx.array, *, invariant: bool = False) -> mx.array:
        """See `Product`."""
        assert not invariant
        product: mx.array = self._module(x)
        return product

    def own_part(self, x: mx.array, *, invariant: bool = False) -> mx.array:
        """See `Product`."""
        return self(x, invariant=invariant)

    def compile(self, *, invariant: bool = False) -> None:
        """See `Product`; there is no kernel."""


def _merge(modules: Sequence[Any], name: str) -> mx.array:
    """Join an array of all modules, and give each a view of its part."""
    if len(modules) == 1:
        modules[0][name] = mx.contiguous(modules[0][name])
        array: mx.array = modules[0][name]
        return array
    merged = mx.concatenate([one[name] for one in modules])
    borders = list(itertools.accumulate(one[name].shape[0] for one in modules))[:-1]
    views = mx.split(merged, borders)
    mx.eval(merged, views)
    for module, view in zip(modules, views, strict=True):
        module[name] = view
    return merged
