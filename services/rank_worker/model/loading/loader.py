"""From a configured model to this rank's shard in memory, in order: check, build, weigh, read.

The model is mlx-lm's, built and split with arrays that are not evaluated. A second one is built and
split from stand-ins only to see where each parameter stands in the files (`graph`); then exactly
these bytes are read. What cannot be followed is read whole by MLX, layer by layer.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

from mlx import nn

from services.rank_worker.collectives import Collectives
from services.rank_worker.model.download import download
from services.rank_worker.model.fingerprint import model_fingerprint
from services.rank_worker.model.loading.build import ReadFile, build
from services.rank_worker.model.loading.cast import asked_dtype, cast
from services.rank_worker.model.loading.fill import Weights, fill, take_weights
from services.rank_worker.model.loading.fit import Needs, check_fits, needs_of
from services.rank_worker.model.loading.origins import WeightOrigins, find_origins
from services.rank_worker.model.loading.source import Source, inspect
from services.rank_worker.model.sharding import Split
from services.rank_worker.model.sharding.apply import apply_split
from services.rank_worker.model.unsharded_traits import UnshardedTraits, read_whole
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.log import Log
from shared.model.checkpoint_files import WeightFile

_log = Log("rank_worker.loading")

Stage = Literal["joining", "downloading", "loading", "warming"]
Report = Callable[[Stage, float], None]

REPORTS_MAX = 200
"""How often progress is told, about."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or this rank's shard of it, in memory."""

    model: nn.Module
    fingerprint: str
    context_tokens_max: int
    shard_bytes: int = 0
    """Bytes of weights on this rank."""
    bytes_read: int = 0
    """Bytes of files that were read for them in parts; what MLX read whole is not counted."""
    whole: UnshardedTraits | None = None
    """What was read off the model before its layers were divided; None: it has all of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that is built, split and weighed; none of its weights is read yet."""

    model: nn.Module
    fingerprint: str
    context_tokens_max: int
    needs: Needs
    """What it takes on this rank."""
    weights: Weights
    origins: WeightOrigins
    files: list[WeightFile]
    whole: UnshardedTraits | None
    """See `LoadedModel`."""

    def read(self, report: Report) -> LoadedModel:
        """Read the weights; once.

        Args:
            report: told the stage and its fraction, 0 to 1.

        Raises:
            ConfigError: they cannot be read, or are too large.
        """
        try:
            progress = _Progress(self.needs.weight_bytes, report)
            bytes_read = fill(self.model, self.weights, self.origins, self.files, progress.add)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise _unreadable(error) from error
        report("loading", 1.0)
        shard_bytes = self.needs.weight_bytes
        _log.info("weights_loaded", shard_bytes=shard_bytes, bytes_read=bytes_read)
        return LoadedModel(
            self.model,
            self.fingerprint,
            self.context_tokens_max,
            shard_bytes,
            bytes_read,
            self.whole,
        )


def open_model(
    settings: ModelConfig,
    source: Source | None,
    split: Split,
    collectives: Collectives,
    report: Report,
) -> OpenedModel:
    """Build the configured model; with several ranks, this rank's shard.

    Args:
        settings: which model, and how.
        source: what `find` gave.
        split: which part of it.
        collectives: the world.
        report: told the stage and its fraction, 0 to 1.

    Raises:
        ConfigError: as `find`, or the model is not supported or not whole.
        UnavailableError: the hub does not answer.
    """
    if source is None:
        source = _downloaded(settings, split, report)
    report("loading", 0.0)
    dtype = asked_dtype(settings)

    def part_of(model: nn.Module) -> str:
        words = apply_split(model, source.config, split, collectives)
        if dtype is not None:
            cast(model, dtype)
        return words

    def make(read_file: ReadFile) -> nn.Module:
        made = build(source, settings, read_file)
        part_of(made)
        return made

    model = build(source, settings)
    # Split otherwise, every rank has all layers, and sees by itself what others see.
    whole = read_whole(model) if split.sharding == "pipeline" else None
    words = part_of(model)
    fingerprint = model_fingerprint(
        source.config,
        source.files,
        dtype=str(dtype or "checkpoint"),
        world_size=split.world_size,
        sharding=words,
    )
    origins = find_origins(make, source.files)
    weights = take_weights(model, origins)
    return OpenedModel(
        model,
        fingerprint,
        source.context_tokens_max,
        needs_of(model, weights.nbytes),
        weights,
        origins,
        source.files,
        whole,
    )


def load(
    settings: ModelConfig,
    source: Source | None,
    split: Split,
    collectives: Collectives,
    report: Report,
    memory_bytes: int = 0,
) -> LoadedModel:
    """Open a model, check that it fits, and read its weights.

    Args:
        settings: which model, and how.
        source: what `find` gave.
        split: which part of it.
        collectives: the world.
        report: told the stage and its fraction, 0 to 1.
        memory_bytes: what this rank may use, what it uses already included; 0: not known.

    Raises:
        ConfigError: as `open_model`, or it is too large or cannot be read.
        UnavailableError: the hub does not answer.
    """
    opened = open_model(settings, source, split, collectives, report)
    check_fits(opened.needs, opened.context_tokens_max, memory_bytes)
    return opened.read(report)


def _downloaded(settings: ModelConfig, split: Split, report: Report) -> Source:
    report("downloading", 0.0)
    folder = download(
        settings.path,
        lambda fraction: report("downloading", fraction),
        code=settings.trust_remote_code,
    )
    return inspect(folder, settings, split.sharding, split.world_size)


class _Progress:
    """Tells bytes as a fraction, not too often."""

    def __init__(self, total: int, report: Report) -> None:
        self._total = max(1, total)
        self._report = report
        self._done = 0
        self._told = 0

    def add(self, count: int) -> None:
        """Count bytes that are loaded."""
        self._done += count
        if (self._done - self._told) * REPORTS_MAX >= self._total:
            self._told = self._done
            self._report("loading", min(1.0, self._done / self._total))


def _unreadable(error: Exception) -> ConfigError:
    if "memory" in str(error).lower() or "malloc" in str(error) or isinstance(error, MemoryError):
        return ConfigError(
            f"The model does not fit into this device's memory ({error}): use a smaller or "
            "more strongly quantized model, or more ranks."
        )
    return ConfigError(f"The weights cannot be read: {error}.")
