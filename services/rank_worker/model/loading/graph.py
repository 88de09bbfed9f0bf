"""The graph from a checkpoint's tensors to a model's parameters, asked of MLX and followed.

MLX can describe how a function's results come from its arguments (`mx.export_function` with a
callback). Given the building and splitting of a model as that function, the description says of
every parameter which tensors it is made of, for every family and every way to split, without
knowing any of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from services.rank_worker.model.loading import strided
from services.rank_worker.model.loading.traced import Traced


def follow(
    function: Callable[[list[mx.array]], list[mx.array]], inputs: Sequence[mx.array]
) -> list[Traced | None]:
    """Return for every result of `function` what it is made of; nothing is evaluated.

    None: it is computed from the inputs, not only moved and cast.

    Args:
        function: from arrays like the inputs to results; it must not evaluate them.
        inputs: have the shapes and types of the real ones; they are never evaluated.

    Raises:
        ValueError: the function evaluates its arguments, or MLX cannot describe what it does.
    """
    description = _Description()
    with _describable():
        mx.export_function(description.take, lambda *given: function(list(given)), *inputs)
    return [description.found.get(name) for name in description.results]


class _Description:
    """What MLX says of a graph, in the order in which it is computed."""

    def __init__(self) -> None:
        self.found: dict[str, Traced | None] = {}
        self.results: list[str] = []

    def take(self, said: dict[str, Any]) -> None:
        """Take the next sentence: the inputs, the results, the constants or one operation."""
        match said["type"]:
            case "inputs":
                for source, (name, shape, dtype) in enumerate(said["inputs"]):
                    array = strided.stored(source, tuple(shape), dtype.size)
                    self.found[name] = Traced(array, dtype, ())
            case "outputs":
                self.results = [name for name, _, _ in said["outputs"]]
            case "primitive":
                given = [self.found.get(name) for name, _, _ in said["inputs"]]
                names = [name for name, _, _ in said["outputs"]]
                shape = tuple(said["outputs"][0][1])
                results = _apply(said["name"], said["arguments"], given, shape)
                self.found.update(zip(names, results, strict=False))


def _apply(
    name: str, arguments: list[Any], given: list[Traced | None], shape: strided.Shape
) -> Sequence[Traced | None]:
    """Return an operation's results; none are known where it does more than move numbers."""
    known = [one for one in given if one is not None]
    if not known or len(known) < len(given):
        return []
    first = known[0]
    match name:
        case "Slice":
            start, stop, step = arguments
            return [first.moved(strided.cut(first.array, start, stop, step))]
        case "Split":
            borders, axis = arguments
            return [first.moved(part) for part in strided.split(first.array, borders, axis)]
        case "Transpose":
            return [first.moved(strided.transposed(first.array, arguments[0]))]
        case "Concatenate" if len({(one.dtype, one.casts) for one in known}) == 1:
            arrays = [one.array for one in known]
            return [first.moved(strided.joined(arrays, arguments[0]))]
        case "Broadcast" if len(known) == 1:
            return [first.moved(strided.repeated(first.array, shape))]
        case "ExpandDims":
            return [first.moved(strided.expanded(first.array, arguments[0]))]
        case "Reshape" | "Flatten" | "Unflatten" | "Squeeze":
            return [first.moved(strided.reshaped(first.array, shape))]
        case "AsType":
            return [first.cast(arguments[0])]
        case "View":
            return [first.viewed(arguments[0])]
        case "Copy" | "Contiguous" | "StopGradient":
            return [first]
    return []


@contextmanager
def _describable() -> Iterator[None]:
    """Keep operations that MLX cannot describe out of the graph, for as long as it is described."""
    kept = {name: getattr(mx, name) for name in ("contiguous", "from_fp8")}

    def contiguous(a: mx.array, *_: Any, **__: Any) -> mx.array:
        return a

    def from_fp8(x: mx.array, dtype: mx.Dtype = mx.bfloat16, **_: Any) -> mx.array:
        # Any operation that computes stands for it: its result cannot be read from the file.
        return mx.sin(x.astype(dtype))

    mx.contiguous, mx.from_fp8 = contiguous, from_fp8
    try:
        yield
    finally:
        for name, real in kept.items():
            setattr(mx, name, real)
