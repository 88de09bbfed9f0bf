"""Loads the configured model's shard of this rank: check, build, measure, read.

mlx-lm builds the model with lazy parameters, which are split. A second model is built and split
from placeholders to trace each parameter to the weight files (`graph`); then exactly those bytes
are read. Tensors that cannot be traced are read whole by MLX, layer by layer.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import mlx.core as mx
from mlx import nn

from services.rank_worker.model.download import download
from services.rank_worker.model.loading.build import (
    ReadFile,
    build_model,
    cast_dtype,
    cast_parameters,
)
from services.rank_worker.model.loading.memory_fit import MemoryNeeds, memory_needs
from services.rank_worker.model.loading.origins import find_origins
from services.rank_worker.model.loading.source import ModelSource, inspect_source
from services.rank_worker.model.loading.weights import ModelWeights, load_weights, plan_weights
from services.rank_worker.model.sharding.apply import apply_split, describe_share
from services.rank_worker.model.sharding.head_split import HeadSplit, split_head
from services.rank_worker.model.sharding.local_experts import keep_all
from services.rank_worker.model.unsharded_traits import UnshardedTraits, read_traits
from services.rank_worker.peers.collectives import Collectives
from services.rank_worker.sampling.vocabulary import VocabularyPart
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.log import Log
from shared.model.checkpoint_files import WeightFile
from shared.model.fingerprint import model_fingerprint
from shared.model.sharding.shares import Split

_log = Log("rank_worker.loading")

Stage = Literal["joining", "init", "downloading", "loading", "warming"]
Report = Callable[[Stage, float], None]

REPORTS_MAX = 200
"""Approximate limit for the number of progress reports."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or this rank's shard of it, with its weights in memory."""

    model: nn.Module
    fingerprint: str
    """Digest of the model's files, settings and split; part of the namespace of stored blocks."""
    context_tokens_max: int
    """Longest sequence in tokens."""
    shard_bytes: int = 0
    """Bytes of weights on this rank."""
    bytes_read: int = 0
    """Bytes of files read for sliced weights; bytes that MLX read itself are not counted."""
    traits: UnshardedTraits | None = None
    """Traits of the model before its layers were divided; None when it has all layers."""
    share: str = ""
    """Which part of the model this rank holds, in words."""
    head: HeadSplit | None = None
    """The division of the head; None: this rank has all of it."""

    @property
    def vocabulary(self) -> VocabularyPart | None:
        """The part of the vocabulary whose logits this rank computes; None: all."""
        return self.head.vocabulary if self.head is not None else None

    @property
    def vocabulary_division(self) -> str:
        """How the vocabulary is divided, in words; equal on all ranks."""
        return self.head.division if self.head is not None else "none"


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that is built and split, with its memory needs and where to read its weights."""

    model: nn.Module
    fingerprint: str
    context_tokens_max: int
    needs: MemoryNeeds
    """Memory that it takes on this rank."""
    weights: ModelWeights
    files: list[WeightFile]
    traits: UnshardedTraits | None
    """See `LoadedModel.traits`."""
    folder: Path
    """The folder with its files."""
    share: str
    """See `LoadedModel.share`."""
    head: HeadSplit | None
    """See `LoadedModel.head`."""

    def read(self, report: Report) -> LoadedModel:
        """Read the weights into the model. To be called once.

        Args:
            report: called with the stage "loading" and the fraction of bytes loaded, 0 to 1.

        Raises:
            ConfigError: when the weights cannot be read or do not fit into memory.
        """
        shard_bytes = self.needs.weight_bytes
        try:
            progress = _Progress(shard_bytes, report)
            bytes_read = load_weights(self.model, self.weights, self.files, progress.add)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise _load_error(error) from error
        report("loading", 1.0)
        _log.info("weights_loaded", shard_bytes=shard_bytes, bytes_read=bytes_read)
        return LoadedModel(
            self.model,
            self.fingerprint,
            self.context_tokens_max,
            shard_bytes,
            bytes_read,
            self.traits,
            self.share,
            self.head,
        )


def open_model(
    settings: ModelConfig,
    source: ModelSource | None,
    split: Split,
    collectives: Collectives,
    report: Report,
) -> OpenedModel:
    """Build the configured model and reduce it to this rank's shard; no weight is read.

    Args:
        settings: the model's path and options.
        source: the result of `find_source`; None: download the model first.
        split: the way of sharding, this rank, and the memory of each rank.
        collectives: the world's collectives.
        report: called with the stage and the fraction done, 0 to 1.

    Raises:
        ConfigError: as in `find_source`, or when the model is not supported or incomplete.
        UnavailableError: when the hub does not answer.
    """
    if source is None:
        source = _download(settings, split, report)
    report("loading", 0.0)
    dtype = cast_dtype(settings)

    def make_shard(read_file: ReadFile) -> nn.Module:
        shard = build_model(source, settings, read_file)
        apply_split(shard, source.config, split, collectives)
        if dtype is not None:
            cast_parameters(shard, dtype)
        if head is not None:
            head.divide(shard, collectives)
        return shard

    model = build_model(source, settings)
    # With any other sharding every rank has all layers, and reads the same traits from them.
    traits = read_traits(model) if split.sharding == "pipeline" else None
    sharding = apply_split(model, source.config, split, collectives)
    keep_all(model)
    if dtype is not None:
        cast_parameters(model, dtype)
    head = split_head(model, split.vocabulary, collectives)
    weights = plan_weights(model, find_origins(make_shard, source.files))
    return OpenedModel(
        model,
        _fingerprint(source, dtype, split.world_size, sharding),
        source.context_tokens_max,
        memory_needs(model, weights.nbytes),
        weights,
        source.files,
        traits,
        source.folder,
        describe_share(model, sharding, split, head),
        head,
    )


def _fingerprint(
    source: ModelSource, dtype: mx.Dtype | None, world_size: int, sharding: str
) -> str:
    """Return the digest of a model, its dtype (None: that of its files) and its split."""
    return model_fingerprint(
        source.config,
        source.files,
        dtype=str(dtype or "checkpoint"),
        world_size=world_size,
        sharding=sharding,
    )


def _download(settings: ModelConfig, split: Split, report: Report) -> ModelSource:
    report("downloading", 0.0)
    folder = download(
        settings.path,
        lambda fraction: report("downloading", fraction),
        code=settings.trust_remote_code,
    )
    return inspect_source(folder, settings, split.sharding, split.world_size)


class _Progress:
    """Reports loaded bytes as a fraction, a limited number of times."""

    def __init__(self, total: int, report: Report) -> None:
        self._total = max(1, total)
        self._report = report
        self._done = 0
        self._reported = 0

    def add(self, count: int) -> None:
        """Count bytes that are loaded."""
        self._done += count
        if (self._done - self._reported) * REPORTS_MAX >= self._total:
            self._reported = self._done
            self._report("loading", min(1.0, self._done / self._total))


def _load_error(error: Exception) -> ConfigError:
    if "memory" in str(error).lower() or "malloc" in str(error) or isinstance(error, MemoryError):
        return ConfigError(
            f"The model does not fit into this device's memory ({error}): use a smaller or "
            "more strongly quantized model, or more ranks."
        )
    return ConfigError(f"The weights cannot be read: {error}.")
