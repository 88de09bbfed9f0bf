"""The configured model on this machine's disk, checked as far as possible without its weights."""

import dataclasses
from pathlib import Path
from typing import Any

from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.messages.base import Sharding
from shared.model import checkpoint_files
from shared.model.checkpoint_files import WeightFile
from shared.model.location import local_folder
from shared.model.sharding.feasibility import check_sharding


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine's disk: its folder, config.json and weight files, already checked."""

    folder: Path
    config: dict[str, Any]
    """Content of config.json."""
    files: list[WeightFile]
    context_tokens_max: int
    """Longest sequence in tokens."""


def find_source(
    settings: ModelConfig, world_size: int, sharding: Sharding = "tensor"
) -> ModelSource | None:
    """Return the configured model; None when it must be downloaded from the hub first.

    Args:
        settings: the model's path and options.
        world_size: number of ranks to split it over.
        sharding: the way of splitting it.

    Raises:
        ConfigError: when there is no such model, it is damaged, or it cannot be split this way.
    """
    folder = local_folder(settings.path)
    return None if folder is None else inspect_source(folder, settings, sharding, world_size)


def inspect_source(
    folder: Path, settings: ModelConfig, sharding: Sharding, world_size: int
) -> ModelSource:
    """Read a model's config and the headers of its weight files; refuse a model that cannot serve.

    Args:
        folder: the model's folder.
        settings: whether its own code may run, and the longest sequence.
        sharding: the way of splitting it.
        world_size: number of ranks to split it over.

    Raises:
        ConfigError: when the model is damaged, cannot be split this way, or its own code would run
            without permission.
    """
    config = checkpoint_files.read_config(folder)
    if config.get("model_file") and not settings.trust_remote_code:
        raise ConfigError(
            f"The model in {folder} runs Python code of its own ({config['model_file']}): "
            "set model.trust_remote_code to true if you trust it."
        )
    check_sharding(config, sharding, world_size)
    files = checkpoint_files.weight_files(folder)
    context = checkpoint_files.context_tokens_max(config, settings.context_tokens_max)
    return ModelSource(folder, config, files, context)
