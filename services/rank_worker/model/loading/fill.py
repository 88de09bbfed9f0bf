"""Gives a model its weights: what its files hold is read in parts, what is computed is computed.

The device holds little more than the shard at any time. Where weights are cast, their stored bytes
are there too for a moment, so the largest go first, while there is room that others take later.
"""

import dataclasses
import re
from collections import deque
from collections.abc import Callable, Iterator

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path

from services.rank_worker.model.loading.origins import WeightOrigins
from services.rank_worker.model.loading.reader import Reader
from services.rank_worker.model.loading.shard_file import DTYPES, read_arrays
from services.rank_worker.model.loading.traced import Traced
from shared.log import Log
from shared.model.checkpoint_files import WeightFile

_log = Log("rank_worker.loading")

GROUP_BYTES = 32 * 1024 * 1024
"""Weights that are evaluated together, unless one alone is larger. The next group is read while one
is cast, so memory for two is needed where weights are cast."""

_LAYER = re.compile(r"^.*?\.\d+\.")

Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Weight:
    """One array of the model that is read by parts; several parameters may share it."""

    traced: Traced
    paths: list[str]
    nbytes: int

    @property
    def passing_bytes(self) -> int:
        """Memory that it takes besides its own while it is loaded."""
        return self.traced.stored_bytes if self.traced.casts else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """All arrays of a model."""

    read: list[Weight]
    computed: dict[str, mx.array]
    """By path: what MLX makes of tensors that it reads whole."""

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        computed = {id(array): array.nbytes for array in self.computed.values()}
        return sum(weight.nbytes for weight in self.read) + sum(computed.values())


def take_weights(model: nn.Module, origins: WeightOrigins) -> Weights:
    """Return a model's arrays, none of them evaluated; those that are read leave the model.

    Args:
        model: built, split and cast.
        origins: where its parameters come from.
    """
    read: dict[Traced, Weight] = {}
    computed: dict[str, mx.array] = {}
    stand_ins: dict[str, mx.array] = {}
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for path, array in parameters.items():
        traced = origins.parameters.get(path)
        if traced is None or not array.size or traced.dtype not in DTYPES:
            computed[path] = array
        elif not _is_same(traced, array):
            _log.warning("weight_traced_wrongly", path=path)
            computed[path] = array
        else:
            read.setdefault(traced, Weight(traced, [], array.nbytes)).paths.append(path)
            stand_ins[path] = mx.broadcast_to(mx.zeros((), dtype=array.dtype), array.shape)
    # MLX closes files that no array is left to be read from: models may have very many of them.
    _replace(model, stand_ins)
    return Weights(list(read.values()), computed)


def fill(
    model: nn.Module,
    weights: Weights,
    origins: WeightOrigins,
    files: list[WeightFile],
    tell: Progress,
) -> int:
    """Give a model its weights.

    Args:
        model: that the weights are from.
        weights: what `take_weights` gave.
        origins: where they come from.
        files: that the origins speak of.
        tell: told how many bytes more are loaded.

    Returns:
        Bytes read by parts.

    Raises:
        ConfigError: a file cannot be read, or was changed meanwhile.
        RuntimeError, MemoryError: MLX cannot read, or has no memory.
    """
    kept_bytes = mx.set_cache_limit(GROUP_BYTES)
    try:
        _evaluate(weights.computed, tell)
        with Reader(files, origins.places) as reader:
            found = _read(weights.read, reader, tell)
    finally:
        mx.set_cache_limit(kept_bytes)
    _replace(model, found)
    return reader.bytes_read


def _read(weights: list[Weight], reader: Reader, tell: Progress) -> dict[str, mx.array]:
    """Return arrays by path, read."""
    weights = sorted(weights, key=lambda weight: -weight.passing_bytes)
    found: dict[str, mx.array] = {}
    before: list[mx.array] = []
    for group in [*_groups(weights), []]:
        stored = deque(read_arrays([weight.traced for weight in group], reader))
        # Taken out one by one, so that nothing keeps what has been cast.
        now = [_cast(stored.popleft(), weight.traced.casts) for weight in group]
        for weight, array in zip(group, now, strict=True):
            found.update(dict.fromkeys(weight.paths, array))
        mx.async_eval(now)
        mx.eval(before)
        tell(sum(array.nbytes for array in before))
        before = now
    reader.check_unchanged()
    return found


def _cast(array: mx.array, dtypes: tuple[mx.Dtype, ...]) -> mx.array:
    for dtype in dtypes:
        array = array.astype(dtype)
    return array


def _groups(weights: list[Weight]) -> Iterator[list[Weight]]:
    """Yield weights that are evaluated together."""
    group: list[Weight] = []
    for weight in weights:
        if group and sum(one.nbytes for one in [*group, weight]) > GROUP_BYTES:
            yield group
            group = []
        group.append(weight)
    if group:
        yield group


def _evaluate(arrays: dict[str, mx.array], tell: Progress) -> None:
    """Let MLX read and compute what is not only moved: layer by layer, the largest first."""
    layers: dict[str, list[mx.array]] = {}
    for path, array in arrays.items():
        found = _LAYER.match(path)
        layers.setdefault(found[0] if found else "", []).append(array)
    nbytes = {layer: sum(array.nbytes for array in layers[layer]) for layer in layers}
    if arrays:
        total = sum(nbytes.values())
        _log.info("weights_computed", count=len(arrays), bytes=total, first=min(arrays))
    for layer in sorted(layers, key=nbytes.__getitem__, reverse=True):
        mx.eval(layers[layer])
        tell(nbytes[layer])


def _is_same(traced: Traced, array: mx.array) -> bool:
    return (traced.array.shape, traced.final_dtype) == (array.shape, array.dtype)


def _replace(model: nn.Module, arrays: dict[str, mx.array]) -> None:
    model.update(tree_map_with_path(arrays.get, model.parameters()))
