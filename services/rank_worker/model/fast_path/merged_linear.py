"""Several matrices with one input as one matrix. Owns its weights.

The modules that held the weights get views of the merged ones, so that nothing is held twice and
mlx-lm's code, which uses these modules, still works.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.nn.layers import distributed  # noqa: TID251  (types of divided matrices only)

_KINDS = (
    nn.Linear,
    nn.QuantizedLinear,
    distributed.AllToShardedLinear,
    distributed.QuantizedAllToShardedLinear,
)
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


class MergedLinear:
    """The matrices of several modules as one: `x` -> the modules' outputs beside each other."""

    def __init__(self, modules: Sequence[Any]) -> None:
        """Merge the weights and replace those of the modules by views. Waits for the device.

        Args:
            modules: modules for which `can_merge` holds, with their weights in memory. For a moment
                the weights of these modules are held twice.
        """
        first = modules[0]
        self._arrays: dict[str, mx.array] = {}
        for name in first.parameters():
            self._arrays[name] = _merge(modules, name)
        self._quantization = {
            name: getattr(first, name) for name in _QUANTIZATION if hasattr(first, name)
        }
        if not self._quantization:
            # A view, once: otherwise each step would have a node for it.
            self._arrays["weight"] = self._arrays["weight"].T
            mx.eval(self._arrays["weight"])

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(array.nbytes for array in self._arrays.values())

    def __call__(self, x: mx.array) -> mx.array:
        """Multiply.

        Args:
            x: [..., inputs].

        Returns:
            [..., outputs of all modules].
        """
        arrays = self._arrays
        if not self._quantization:
            if "bias" in arrays:
                return mx.addmm(arrays["bias"], x, arrays["weight"])
            return x @ arrays["weight"]
        product = mx.quantized_matmul(
            x,
            arrays["weight"],
            scales=arrays["scales"],
            biases=arrays.get("biases"),
            transpose=True,
            **self._quantization,
        )
        return product + arrays["bias"] if "bias" in arrays else product


def _merge(modules: Sequence[Any], name: str) -> mx.array:
    """Join an array of all modules, and give each a view of its part."""
    if len(modules) == 1:
        array: mx.array = modules[0][name]
        return array
    merged = mx.concatenate([one[name] for one in modules])
    views = mx.split(merged, _borders([one[name].shape[0] for one in modules]))
    mx.eval(merged, views)
    for module, view in zip(modules, views, strict=True):
        module[name] = view
    return merged


def _borders(sizes: Sequence[int]) -> list[int]:
    borders = [0]
    for size in sizes:
        borders.append(borders[-1] + size)
    return borders[1:-1]
