"""Detects LoRA adapters in the model's folder, because Lockstep does not apply them."""

from pathlib import Path

from shared.configuration.settings import Config
from shared.errors import ConfigError

FILES = ("adapter_config.json", "adapters.safetensors", "adapter_model.safetensors")
"""Files that mlx_lm and PEFT write into the folder of an adapter."""

_REMEDY = (
    "fuse it into the model with `mlx_lm.fuse --model MODEL --adapter-path FOLDER`, and set "
    "model.path to the folder that this writes"
)


def check(config: Config) -> list[str]:
    """Warn of a LoRA adapter in the model's folder, because Lockstep does not apply adapters.

    Returns:
        A list with one warning when the folder holds a model and an adapter's files (FILES), else
        [].

    Raises:
        ConfigError: when the folder holds only an adapter, or holds one and there are several
            ranks.
    """
    try:
        folder = Path(config.model.path).expanduser()
        found = next((name for name in FILES if (folder / name).is_file()), None)
        is_model = (folder / "config.json").is_file()
    except (OSError, RuntimeError):
        # Loading the model reports why the folder cannot be read.
        return []
    if found is None:
        return []
    if not is_model:
        raise ConfigError(
            f"model.path {folder} is an adapter (LoRA: it holds {found}), not a model: {_REMEDY}."
        )
    if config.backend != "off":
        raise ConfigError(
            f"The model folder {folder} holds an adapter ({found}), and adapters cannot be used "
            f"with several ranks: {_REMEDY}, or delete the file."
        )
    return [f"The model folder {folder} holds an adapter ({found}), which is not used: {_REMEDY}."]
