"""From a configured model to weights in this rank's memory: find, check, build, shard, cast, read.

Mirrors `mlx_lm.load` and `mlx_lm.utils.sharded_load`, without the tokenizer (ranks know no text)
and with every check that needs no weights before the first weight is read.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map_with_path
from mlx_lm.utils import load_model

from services.rank_worker import model_files
from services.rank_worker.collectives import Collectives
from services.rank_worker.download import download
from services.rank_worker.fingerprint import model_fingerprint
from services.rank_worker.model_files import WeightFile
from services.rank_worker.sharding import Split, check_divides
from services.rank_worker.sharding.apply import apply_split
from shared.errors import ConfigError
from shared.log import Log
from shared.model_location import local_folder
from shared.settings import ModelConfig

_log = Log("rank_worker.loading")

Stage = Literal["joining", "downloading", "loading", "warming"]
Report = Callable[[Stage, float], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A model on this machine's disk that may be loaded."""

    folder: Path
    config: dict[str, Any]
    files: list[WeightFile]
    context_tokens_max: int


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or this rank's shard of it, in memory."""

    model: nn.Module
    fingerprint: str
    context_tokens_max: int


def find(settings: ModelConfig, world_size: int) -> Source | None:
    """Return the configured model if it is on this machine, None if it must be asked of the hub.

    Raises:
        ConfigError: there is no such model, it is damaged, or cannot be split over so many ranks.
    """
    folder = local_folder(settings.path)
    return None if folder is None else _inspect(folder, settings, world_size)


def load(
    settings: ModelConfig,
    source: Source | None,
    split: Split,
    collectives: Collectives,
    report: Report,
) -> LoadedModel:
    """Load the configured model; with several ranks, this rank's shard.

    Args:
        settings: which model, and how.
        source: what `find` gave.
        split: which part of it.
        collectives: the world.
        report: told the stage and its fraction, 0 to 1.

    Raises:
        ConfigError: as `find`, or the model is not supported, not whole or too large.
        UnavailableError: the hub does not answer.
    """
    if source is None:
        report("downloading", 0.0)
        folder = download(
            settings.path,
            lambda fraction: report("downloading", fraction),
            code=settings.trust_remote_code,
        )
        source = _inspect(folder, settings, collectives.world_size)
    report("loading", 0.0)
    dtype = _dtype(settings)
    model = _build(source, settings)
    apply_split(model, source.config, split, collectives)
    if dtype is not None:
        _cast(model, dtype)
    _read(model, report)
    fingerprint = model_fingerprint(
        source.config,
        source.files,
        dtype=str(dtype or "checkpoint"),
        world_size=split.world_size,
        sharding=split.sharding,
    )
    return LoadedModel(model, fingerprint, source.context_tokens_max)


def _inspect(folder: Path, settings: ModelConfig, world_size: int) -> Source:
    """Check all that needs no weights."""
    config = model_files.read_config(folder)
    if config.get("model_file") and not settings.trust_remote_code:
        raise ConfigError(
            f"The model in {folder} runs Python code of its own ({config['model_file']}): "
            "set model.trust_remote_code to true if you trust it."
        )
    check_divides(config, world_size)
    files = model_files.weight_files(folder)
    context = model_files.context_tokens_max(config, settings.context_tokens_max)
    return Source(folder, config, files, context)


def _build(source: Source, settings: ModelConfig) -> nn.Module:
    """Build the model with weights that are not read yet."""
    name, folder = source.config["model_type"], source.folder
    try:
        model, _ = load_model(folder, lazy=True, trust_remote_code=settings.trust_remote_code)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        _log.debug("model_not_built", error=repr(error))
        if "not supported" in text:
            raise ConfigError(
                f'mlx-lm does not support models of type "{name}": use another model, '
                "or a newer mlx-lm."
            ) from error
        raise ConfigError(
            f"The weights in {folder} do not fit its config ({name}): {text[:500]}"
        ) from error
    return model


def _dtype(settings: ModelConfig) -> mx.Dtype | None:
    """Return the type to cast to, or None for the checkpoint's."""
    if settings.dtype != "auto":
        found: mx.Dtype = getattr(mx, settings.dtype)
        return found
    # On the CPU only float32 goes through BLAS, and some operations exist for nothing else.
    return mx.float32 if mx.default_device().type == mx.DeviceType.cpu else None


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast floating-point parameters, except those that the model keeps in float32 on purpose."""
    keeps = getattr(model, "cast_predicate", None)

    def cast(path: str, value: Any) -> Any:
        if not isinstance(value, mx.array) or not mx.issubdtype(value.dtype, mx.floating):
            return value
        if dtype != mx.float32 and keeps is not None and not keeps(path):
            return value
        return value.astype(dtype)

    model.update(tree_map_with_path(cast, model.parameters()))


def _read(model: nn.Module, report: Report) -> None:
    """Read the weights layer by layer: only one layer is in memory unsplit at a time."""
    layers = list(getattr(model, "layers", []))
    try:
        for number, layer in enumerate(layers):
            mx.eval(layer.parameters())
            report("loading", (number + 1) / (len(layers) + 1))
        mx.eval(model.parameters())
    except (RuntimeError, ValueError, MemoryError) as error:
        if "memory" in str(error).lower() or isinstance(error, MemoryError):
            raise ConfigError(
                f"The model does not fit into this device's memory ({error}): use a smaller or "
                "more strongly quantized model, or more ranks."
            ) from error
        raise ConfigError(f"The weights cannot be read: {error}.") from error
    report("loading", 1.0)
