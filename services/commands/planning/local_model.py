"""Where a model lies on this machine: a folder, or what was downloaded before. No network."""

from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from shared.errors import ConfigError
from shared.model.location import local_folder


def find_folder(path: str) -> Path:
    """Return the folder of a model.

    Args:
        path: a folder, "demo", or a Hugging Face id.

    Raises:
        ConfigError: it is not on this machine.
    """
    folder = local_folder(path)
    if folder is not None:
        return folder
    config = try_to_load_from_cache(path, "config.json")
    if isinstance(config, str):
        return Path(config).parent
    raise ConfigError(
        f"{path} is not on this machine, and planning downloads nothing: fetch it with "
        f"`hf download {path}`, or name a folder that holds it."
    )
