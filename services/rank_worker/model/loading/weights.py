"""Loads a model's weights: sliced from the files where possible, otherwise computed by MLX.

The device never holds much more than the shard. While a weight is cast, its stored bytes also take
memory; so the largest are cast first, when the rest of the shard is not loaded yet.
"""

import dataclasses
import re
from collections import deque
from collections.abc import Callable, Iterator

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path

from services.rank_worker.model.loading.graph import WeightOrigin
from services.rank_worker.model.loading.origins import WeightOrigins
from services.rank_worker.model.loading.virtual_safetensors import DTYPES, read_arrays
from services.rank_worker.model.loading.weight_reader import TensorLocation, WeightReader
from shared.log import Log
from shared.model.checkpoint_files import WeightFile

_log = Log("rank_worker.loading")

GROUP_BYTES = 32 * 1024 * 1024
"""Upper limit for weights that are evaluated together, except for single larger ones. The next
group is read while one is cast, so casting needs memory for two groups."""

_LAYER_PREFIX = re.compile(r"^.*?\.\d+\.")

ReportBytes = Callable[[int], None]
"""Receives the number of bytes loaded since the last call."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlicedWeight:
    """One array that is read from slices of the files. Several parameters may share it."""

    origin: WeightOrigin
    paths: list[str]
    """Paths of its parameters."""
    nbytes: int

    @property
    def temporary_bytes(self) -> int:
        """Bytes that loading takes beside the array: the numbers before casts; 0 without casts."""
        return self.origin.stored_bytes if self.origin.casts else 0


@dataclasses.dataclass(frozen=True, slots=True)
class ModelWeights:
    """All arrays of a model: those read from slices of the files, and those that MLX computes."""

    sliced: list[SlicedWeight]
    computed: dict[str, mx.array]
    """By parameter path: lazy arrays that MLX computes from whole tensors."""
    locations: list[TensorLocation]
    """Location of each stored tensor, by the tensor index that origins use."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays once they are loaded; shared arrays count once."""
        computed = {id(array): array.nbytes for array in self.computed.values()}
        return sum(weight.nbytes for weight in self.sliced) + sum(computed.values())


def plan_weights(model: nn.Module, origins: WeightOrigins) -> ModelWeights:
    """Divide a model's arrays into those read from slices of the files and those that MLX computes.

    Nothing is evaluated. Arrays that are read from slices are replaced in the model by placeholders
    without memory.

    Args:
        model: the model, built, split and cast, with lazy parameters.
        origins: origins of its parameters.
    """
    sliced: dict[WeightOrigin, SlicedWeight] = {}
    computed: dict[str, mx.array] = {}
    placeholders: dict[str, mx.array] = {}
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for path, array in parameters.items():
        origin = origins.parameters.get(path)
        if origin is None or not array.size or origin.dtype not in DTYPES:
            computed[path] = array
        elif (origin.array.shape, origin.final_dtype) != (array.shape, array.dtype):
            _log.warning("weight_origin_mismatch", path=path)
            computed[path] = array
        else:
            weight = sliced.setdefault(origin, SlicedWeight(origin, [], array.nbytes))
            weight.paths.append(path)
            placeholders[path] = mx.broadcast_to(mx.zeros((), dtype=array.dtype), array.shape)
    # MLX closes a file once no lazy array refers to it: models may have very many files.
    _replace(model, placeholders)
    return ModelWeights(list(sliced.values()), computed, origins.locations)


def load_weights(
    model: nn.Module,
    weights: ModelWeights,
    files: list[WeightFile],
    report: ReportBytes,
) -> int:
    """Load a model's weights into it.

    Args:
        model: the model that `plan_weights` was called with.
        weights: the result of `plan_weights`.
        files: the model's weight files.
        report: called with the number of bytes loaded since the last call.

    Returns:
        Bytes read from files for sliced weights.

    Raises:
        ConfigError: when a file cannot be read or changed meanwhile.
        RuntimeError: when MLX cannot read a file or has no memory.
        MemoryError: when there is no host memory.
    """
    cache_limit_bytes = mx.set_cache_limit(GROUP_BYTES)
    try:
        _compute(weights.computed, report)
        with WeightReader(files, weights.locations) as reader:
            arrays = _read(weights.sliced, reader, report)
    finally:
        mx.set_cache_limit(cache_limit_bytes)
    _replace(model, arrays)
    return reader.bytes_read


def _read(
    weights: list[SlicedWeight], reader: WeightReader, report: ReportBytes
) -> dict[str, mx.array]:
    """Return the loaded arrays by parameter path."""
    weights = sorted(weights, key=lambda weight: -weight.temporary_bytes)
    loaded: dict[str, mx.array] = {}
    previous: list[mx.array] = []
    for group in [*_groups(weights), []]:
        stored = deque(read_arrays([weight.origin for weight in group], reader))
        # Removed from the deque one by one, so that stored arrays are freed once they are cast.
        current = [_cast(stored.popleft(), weight.origin.casts) for weight in group]
        for weight, array in zip(group, current, strict=True):
            loaded.update(dict.fromkeys(weight.paths, array))
        mx.async_eval(current)
        mx.eval(previous)
        report(sum(array.nbytes for array in previous))
        previous = current
    reader.check_unchanged()
    return loaded


def _cast(array: mx.array, dtypes: tuple[mx.Dtype, ...]) -> mx.array:
    for dtype in dtypes:
        array = array.astype(dtype)
    return array


def _groups(weights: list[SlicedWeight]) -> Iterator[list[SlicedWeight]]:
    """Yield weights that are evaluated together."""
    group: list[SlicedWeight] = []
    for weight in weights:
        if group and sum(one.nbytes for one in [*group, weight]) > GROUP_BYTES:
            yield group
            group = []
        group.append(weight)
    if group:
        yield group


def _compute(arrays: dict[str, mx.array], report: ReportBytes) -> None:
    """Let MLX compute arrays from whole tensors, layer by layer, the largest layer first."""
    layers: dict[str, list[mx.array]] = {}
    for path, array in arrays.items():
        prefix = _LAYER_PREFIX.match(path)
        layers.setdefault(prefix[0] if prefix else "", []).append(array)
    nbytes = {layer: sum(array.nbytes for array in layers[layer]) for layer in layers}
    if arrays:
        total = sum(nbytes.values())
        _log.info("weights_computed", count=len(arrays), bytes=total, first=min(arrays))
    for layer in sorted(layers, key=nbytes.__getitem__, reverse=True):
        mx.eval(layers[layer])
        report(nbytes[layer])


def _replace(model: nn.Module, arrays: dict[str, mx.array]) -> None:
    model.update(tree_map_with_path(arrays.get, model.parameters()))
