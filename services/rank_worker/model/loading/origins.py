"""Where each of a model's parameters stands in its weight files."""

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
from services.rank_worker.model.loading.graph import follow
from services.rank_worker.model.loading.reader import Place
from services.rank_worker.model.loading.traced import Traced
from shared.log import Log
from shared.model.checkpoint_files import WeightFile

_log = Log("rank_worker.loading")

MakeModel = Callable[[ReadFile], nn.Module]


@dataclasses.dataclass(frozen=True, slots=True)
class WeightOrigins:
    """What is known of a model's parameters."""

    parameters: dict[str, Traced]
    """By path; those that are computed and not only moved are missing."""
    places: list[Place]
    """Where the stored tensors are that origins speak of."""


def find_origins(make: MakeModel, files: Sequence[WeightFile]) -> WeightOrigins:
    """Return where a model's parameters come from; nothing is read and nothing computed.

    Args:
        make: builds, splits and casts the model from what the files hold.
        files: its weight files.
    """
    # Hundreds of thousands of small objects, none of them in cycles.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _find(make, files)
    except Exception as error:  # noqa: BLE001 - a family's own code ran; MLX's own way is left
        _log.info("weights_not_traced", detail=f"{type(error).__name__}: {error}"[:500])
        return WeightOrigins({}, [])
    finally:
        if collects:
            gc.enable()


def _find(make: MakeModel, files: Sequence[WeightFile]) -> WeightOrigins:
    inputs, keys, places = _stand_ins(files)
    paths: list[str] = []

    def parameters(given: list[mx.array]) -> list[mx.array]:
        held: dict[Path, dict[str, mx.array]] = {file.path: {} for file in files}
        for (path, name), array in zip(keys, given, strict=True):
            held[path][name] = array
        flat: Any = tree_flatten(make(held.__getitem__).parameters())
        paths.extend(path for path, _ in flat)
        return [array for _, array in flat]

    results = zip(paths, follow(parameters, inputs), strict=True)
    found = {path: traced for path, traced in results if traced is not None}
    return WeightOrigins(found, places)


def _stand_ins(
    files: Sequence[WeightFile],
) -> tuple[list[mx.array], list[tuple[Path, str]], list[Place]]:
    """Return for each stored tensor an array without memory, its name, and where it is.

    Raises:
        ValueError: MLX makes something else of a tensor than what is stored.
    """
    arrays, keys, places = [], [], []
    for index, file in enumerate(files):
        headers = json.loads(file.header)
        # MLX says what shape and type it makes of a tensor; it reads the header only.
        tensors: dict[str, mx.array] = mx.load(str(file.path))  # type: ignore[assignment]
        for name, tensor in tensors.items():
            begin, end = headers[name]["data_offsets"]
            if end - begin != tensor.nbytes:
                text = f"{name} takes {end - begin} bytes in {file.path}, MLX says {tensor.nbytes}"
                raise ValueError(text)
            zero = mx.zeros((), dtype=tensor.dtype)
            arrays.append(mx.broadcast_to(zero, tensor.shape))
            keys.append((file.path, name))
            places.append((index, file.payload_start + begin))
    return arrays, keys, places
