"""Where the configured model is, and all about it that can be checked without its weights."""

import dataclasses
from pathlib import Path
from typing import Any

from services.rank_worker.model.sharding import check_possible
from shared.configuration.settings import ModelConfig
from shared.errors import ConfigError
from shared.messages.rank_link import Sharding
from shared.model import checkpoint_files
from shared.model.checkpoint_files import WeightFile
from shared.model.location import local_folder


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A model on this machine's disk that may be loaded."""

    folder: Path
    config: dict[str, Any]
    files: list[WeightFile]
    context_tokens_max: int


def find(settings: ModelConfig, world_size: int, sharding: Sharding = "tensor") -> Source | None:
    """Return the configured model if it is on this machine, None if it must be asked of the hub.

    Raises:
        ConfigError: there is no such model, it is damaged, or cannot be split so.
    """
    folder = local_folder(settings.path)
    return None if folder is None else inspect(folder, settings, sharding, world_size)


def inspect(folder: Path, settings: ModelConfig, sharding: Sharding, world_size: int) -> Source:
    """Check all that needs no weights.

    Raises:
        ConfigError: as `find`.
    """
    config = checkpoint_files.read_config(folder)
    if config.get("model_file") and not settings.trust_remote_code:
        raise ConfigError(
            f"The model in {folder} runs Python code of its own ({config['model_file']}): "
            "set model.trust_remote_code to true if you trust it."
        )
    check_possible(config, sharding, world_size)
    files = checkpoint_files.weight_files(folder)
    context = checkpoint_files.context_tokens_max(config, settings.context_tokens_max)
    return Source(folder, config, files, context)
