"""The origin of each model parameter in the weight files. Reads only file headers."""

import dataclasses
import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from services.rank_worker.model.loading.build import ReadFile
from services.rank_worker.model.loading.graph import WeightOrigin, trace_results
from services.rank_worker.model.loading.weight_reader import TensorLocation
from shared.log import Log
from shared.model.checkpoint_files import WeightFile

_log = Log("rank_worker.loading")

MakeModel = Callable[[ReadFile], nn.Module]


@dataclasses.dataclass(frozen=True, slots=True)
class WeightOrigins:
    """For each model parameter, the stored numbers that it is made of."""

    parameters: dict[str, WeightOrigin]
    """By parameter path, without parameters that are computed and not only moved."""
    locations: list[TensorLocation]
    """Location of each stored tensor, by the tensor index that origins use."""


def find_origins(make: MakeModel, files: Sequence[WeightFile]) -> WeightOrigins:
    """Trace which stored numbers a model's parameters are made of; no weight is read or computed.

    Args:
        make: builds, splits and casts the model from the arrays of its files.
        files: the model's weight files.

    Returns:
        The origins of the parameters. None of them if the model cannot be traced: MLX then reads
        all weights itself.
    """
    # Hundreds of thousands of small objects without cycles: collecting garbage only takes time.
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        return _trace(make, files)
    except Exception as error:  # noqa: BLE001 - the model's own code ran
        _log.info("weights_not_traced", detail=f"{type(error).__name__}: {error}"[:500])
        return WeightOrigins({}, [])
    finally:
        if is_enabled:
            gc.enable()


def _trace(make: MakeModel, files: Sequence[WeightFile]) -> WeightOrigins:
    inputs, keys, locations = _placeholders(files)
    paths: list[str] = []

    def build_parameters(given: list[mx.array]) -> list[mx.array]:
        arrays: dict[Path, dict[str, mx.array]] = {file.path: {} for file in files}
        for (path, name), array in zip(keys, given, strict=True):
            arrays[path][name] = array
        flat: Any = tree_flatten(make(arrays.__getitem__).parameters())
        paths.extend(path for path, _ in flat)
        return [array for _, array in flat]

    results = zip(paths, trace_results(build_parameters, inputs), strict=True)
    origins = {path: origin for path, origin in results if origin is not None}
    return WeightOrigins(origins, locations)


def _placeholders(
    files: Sequence[WeightFile],
) -> tuple[list[mx.array], list[tuple[Path, str]], list[TensorLocation]]:
    """Return, by stored tensor: an array without memory, its (file, name), and its location.

    Raises:
        ValueError: when MLX gives a tensor another size than it has in the file.
    """
    arrays, keys, locations = [], [], []
    for index, file in enumerate(files):
        headers = json.loads(file.header)
        # MLX reads only the header here; its shapes and types are used.
        tensors: dict[str, mx.array] = mx.load(str(file.path))  # type: ignore[assignment]
        for name, tensor in tensors.items():
            begin, end = headers[name]["data_offsets"]
            if end - begin != tensor.nbytes:
                text = f"{name} takes {end - begin} bytes in {file.path}, MLX says {tensor.nbytes}"
                raise ValueError(text)
            zero = mx.zeros((), dtype=tensor.dtype)
            arrays.append(mx.broadcast_to(zero, tensor.shape))
            keys.append((file.path, name))
            locations.append((index, file.payload_start + begin))
    return arrays, keys, locations
