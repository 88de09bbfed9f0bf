"""Products that a family's code computes with one input, as one product while a decode is built."""

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from services.rank_worker.model.fast_path.comparison import calls_replaced, relative_difference
from services.rank_worker.model.fast_path.kernels.few_rows import FEW_ROWS_MAX, FewRows
from services.rank_worker.model.fast_path.kernels.matrices import matrix_of
from services.rank_worker.model.fast_path.merged_linear import (
    MergedLinear,
    Product,
    can_merge,
    can_sum,
    single_product,
)

Matrices = list[Any]
"""Modules, one matrix each, that are called with the same array, in the order of the calls."""


@contextlib.contextmanager
def matrices_noted(inner: nn.Module) -> Iterator[list[Matrices]]:
    """Note which matrices of a model are called with the same array while a forward is built.

    Args:
        inner: the model without its head.

    Yields:
        A list that has the matrices of each array in the end.
    """
    calls: list[tuple[Any, mx.array]] = []
    found: list[Matrices] = []

    def noting(original: Any) -> Callable[[Any, mx.array], mx.array]:
        def call(module: Any, x: mx.array) -> mx.array:
            # The array is kept, so that no other one can have its `id`.
            calls.append((module, x))
            result: mx.array = original.__call__(module, x)
            return result

        return call

    matrices = [one for one in inner.modules() if can_sum(one) or can_merge([one])]
    try:
        with calls_replaced(matrices, noting):
            yield found
        found += _with_one_input(calls)
    finally:
        # The replaced classes refer to the arrays until Python collects them, and those to weights.
        calls.clear()


def _with_one_input(calls: list[tuple[Any, mx.array]]) -> list[Matrices]:
    """Return the matrices of each array, without those that are called with several."""
    by_input: dict[int, Matrices] = {}
    for module, x in calls:
        by_input.setdefault(id(x), []).append(module)
    counts = collections.Counter(id(module) for module, _ in calls)
    once = ([one for one in group if counts[id(one)] == 1] for group in by_input.values())
    return [group for group in once if group]


class MergedProducts:
    """Computes the products of matrices of one model."""

    def __init__(self, groups: Sequence[Matrices], few_rows: FewRows | None) -> None:
        """Merge the matrices of each group; waits for the device.

        Args:
            groups: the result of `matrices_noted`, with the weights in memory.
            few_rows: multiplies few rows, where it can; None: MLX multiplies all.
        """
        self._products: dict[int, _GroupProduct] = {}
        """By the `id` of each matrix."""
        self._matrices: Matrices = []
        for group in itertools.chain.from_iterable(map(_of_one_kind, groups)):
            if len(group) == 1 and few_rows is None:
                continue
            product = _GroupProduct(group, few_rows)
            # The merged weights replace those that the modules have held.
            mx.clear_cache()
            self._matrices += group
            self._products |= {id(one): product for one in group}

    def compile(self) -> None:
        """Have the kernels of the products compiled, so that no step waits for it."""
        for product in {one.kind: one for one in self._products.values()}.values():
            product.compile()

    def compare(self) -> list[float]:
        """Return how much products differ from those of the modules; 0 if rounding explains it.

        All ranks call this together, as products of divided matrices are summed.
        """
        products = dict.fromkeys(self._products.values())
        return [
            one.compare(rows) for one in products for rows in (1, FEW_ROWS_MAX, FEW_ROWS_MAX + 1)
        ]

    def used(self) -> contextlib.AbstractContextManager[None]:
        """Have the matrices' modules return their parts of the merged products."""

        def merged(_original: Any) -> Callable[[Any, mx.array], mx.array]:
            return lambda module, x: self._products[id(module)](module, x)

        return calls_replaced(self._matrices, merged)


class _GroupProduct:
    """The product of one array with some matrices."""

    def __init__(self, matrices: Matrices, few_rows: FewRows | None) -> None:
        """Merge the weights; arguments as those of `MergedProducts`."""
        self._matrices = matrices
        self.kind = tuple(
            (type(one), name, array.shape, array.dtype)
            for one in matrices
            for name, array in one.parameters().items()
        )
        """Equal for products that are computed by one kernel."""
        ends = list(itertools.accumulate(len(one.weight) for one in matrices))
        self._borders = ends[:-1]
        self._multiply: Product = (
            single_product(matrices[0], few_rows)
            if len(matrices) == 1
            else MergedLinear(matrices, few_rows)
        )
        self._input: mx.array | None = None
        self._parts: list[mx.array] = []

    def compile(self) -> None:
        """Have the kernel of the product compiled."""
        self._multiply.compile()

    def compare(self, rows: int) -> float:
        """Return how much the product of random rows differs; 0 if rounding explains it."""
        matrix = matrix_of(self._matrices[0])
        x = mx.random.normal((rows, matrix.inputs), key=mx.random.key(rows))
        x = x.astype(matrix.dtype or mx.bfloat16)
        pairs = [(one(x), self(one, x)) for one in self._matrices]
        return max(relative_difference(expected, found, x) for expected, found in pairs)

    def __call__(self, module: Any, x: mx.array) -> mx.array:
        """Return the product of [..., inputs] with one of the matrices, [..., its outputs]."""
        if x is not self._input:
            product = self._multiply(x.reshape(-1, x.shape[-1]))
            parts = mx.split(product.reshape(*x.shape[:-1], -1), self._borders, axis=-1)
            self._input, self._parts = x, list(parts)
        place = next(place for place, one in enumerate(self._matrices) if one is module)
        part = self._parts[place]
        if place == len(self._parts) - 1:
            # Without this the arrays of a finished graph would stay in memory.
            self._input, self._parts = None, []
        return part


def _of_one_kind(group: Matrices) -> Iterator[Matrices]:
    """Divide matrices with one input into those that can be merged."""
    rest = group
    while rest:
        first = rest[0]
        same = [first] if can_sum(first) else [one for one in rest if can_merge([first, one])]
        yield same
        rest = [one for one in rest if all(one is not other for other in same)]
