"""Traces each model parameter back to the stored tensors it is made of.

MLX can describe how a function's results follow from its arguments (`mx.export_function` with a
callback). When the function builds and splits a model, the description says which tensors each
parameter is made of, for every model family and every way to split. Nothing is evaluated.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from services.rank_worker.model.loading import tensor_slices
from services.rank_worker.model.loading.tensor_slices import Shape, SlicedArray


@dataclasses.dataclass(frozen=True, slots=True)
class WeightOrigin:
    """Which slices of stored tensors a parameter is made of, and the dtypes they are cast to."""

    array: SlicedArray
    dtype: mx.Dtype
    """Type of the stored numbers."""
    casts: tuple[mx.Dtype, ...]
    """Types that the numbers are cast to, one after the other."""

    def moved(self, array: SlicedArray | None) -> "WeightOrigin | None":
        """Return the origin with the same stored dtype and casts, made of other slices.

        Args:
            array: the new slices, for example after a transpose; None (they cannot be described)
                gives None.
        """
        return None if array is None else dataclasses.replace(self, array=array)

    def cast(self, dtype: mx.Dtype) -> "WeightOrigin":
        """Return the origin with one more cast at the end."""
        return dataclasses.replace(self, casts=(*self.casts, dtype))

    def viewed(self, dtype: mx.Dtype) -> "WeightOrigin | None":
        """Return the origin with its stored bytes read as another dtype, like `array.view(dtype)`.

        Returns:
            None after a cast, or when the bytes of a larger item are not adjacent in the stored
            tensor.
        """
        array = None if self.casts else tensor_slices.reinterpret(self.array, dtype.size)
        return None if array is None else WeightOrigin(array, dtype, ())

    @property
    def final_dtype(self) -> mx.Dtype:
        """The type after all casts."""
        return self.casts[-1] if self.casts else self.dtype

    @property
    def stored_bytes(self) -> int:
        """Bytes that the numbers take in the weight files, before any cast."""
        return math.prod(self.array.shape) * self.array.item_bytes


def trace_results(
    function: Callable[[list[mx.array]], list[mx.array]], inputs: Sequence[mx.array]
) -> list[WeightOrigin | None]:
    """Return the origin of each result of `function` in the inputs; nothing is evaluated.

    Args:
        function: maps arrays like the inputs to results; must not evaluate them.
        inputs: arrays with the shapes and types of the stored tensors; never evaluated.

    Returns:
        By result: its origin, or None when it is computed and not only moved and cast.

    Raises:
        ValueError: when the function evaluates its arguments, or MLX cannot describe it.
    """
    recorder = _GraphRecorder()
    with _describable():
        mx.export_function(recorder.record, lambda *given: function(list(given)), *inputs)
    return [recorder.origins.get(name) for name in recorder.results]


class _GraphRecorder:
    """Receives MLX's description of a graph, in order of computation."""

    def __init__(self) -> None:
        self.origins: dict[str, WeightOrigin | None] = {}
        """By MLX's name of an array."""
        self.results: list[str] = []
        """Names of the function's results."""

    def record(self, item: dict[str, Any]) -> None:
        """Record the inputs, the results or one operation; constants are ignored."""
        match item["type"]:
            case "inputs":
                for tensor, (name, shape, dtype) in enumerate(item["inputs"]):
                    array = tensor_slices.whole_tensor(tensor, tuple(shape), dtype.size)
                    self.origins[name] = WeightOrigin(array, dtype, ())
            case "outputs":
                self.results = [name for name, _, _ in item["outputs"]]
            case "primitive":
                inputs = [self.origins.get(name) for name, _, _ in item["inputs"]]
                names = [name for name, _, _ in item["outputs"]]
                shape = tuple(item["outputs"][0][1])
                results = _apply(item["name"], item["arguments"], inputs, shape)
                self.origins.update(zip(names, results, strict=False))


def _apply(
    name: str, arguments: list[Any], inputs: list[WeightOrigin | None], shape: Shape
) -> Sequence[WeightOrigin | None]:
    """Return the origins of an operation's results; [] when it does more than move numbers.

    Args:
        name: MLX's name of the operation.
        arguments: its arguments that are not arrays.
        inputs: origins of its array arguments.
        shape: shape of its first result.
    """
    known = [one for one in inputs if one is not None]
    if not known or len(known) < len(inputs):
        return []
    first = known[0]
    match name:
        case "Slice":
            start, stop, step = arguments
            return [first.moved(tensor_slices.slice_array(first.array, start, stop, step))]
        case "Split":
            boundaries, axis = arguments
            parts = tensor_slices.split_array(first.array, boundaries, axis)
            return [first.moved(part) for part in parts]
        case "Transpose":
            return [first.moved(tensor_slices.transpose(first.array, arguments[0]))]
        case "Concatenate" if len({(one.dtype, one.casts) for one in known}) == 1:
            arrays = [one.array for one in known]
            return [first.moved(tensor_slices.concatenate(arrays, arguments[0]))]
        case "Broadcast" if len(known) == 1:
            return [first.moved(tensor_slices.broadcast(first.array, shape))]
        case "Reshape" | "Flatten" | "Unflatten" | "ExpandDims" | "Squeeze":
            return [first.moved(tensor_slices.reshape(first.array, shape))]
        case "AsType":
            return [first.cast(arguments[0])]
        case "View":
            return [first.viewed(arguments[0])]
        case "Copy" | "Contiguous" | "StopGradient":
            return [first]
    return []


@contextmanager
def _describable() -> Iterator[None]:
    """Replace operations that MLX cannot describe while a graph is recorded."""
    originals = {name: getattr(mx, name) for name in ("contiguous", "from_fp8")}

    def contiguous(a: mx.array, *_: Any, **__: Any) -> mx.array:
        return a

    def from_fp8(x: mx.array, dtype: mx.Dtype = mx.bfloat16, **_: Any) -> mx.array:
        # Any operation that computes will do: its result cannot be read from the file.
        return mx.sin(x.astype(dtype))

    mx.contiguous, mx.from_fp8 = contiguous, from_fp8
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(mx, name, original)
