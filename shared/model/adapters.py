"""LoRA adapters, which Lockstep does not apply: found by their files, and named in time."""

from pathlib import Path

from shared.configuration.settings import Config
from shared.errors import ConfigError

FILES = ("adapter_config.json", "adapters.safetensors", "adapter_model.safetensors")
"""What mlx_lm and PEFT leave in the folder of an adapter."""

_REMEDY = (
    "fuse it into the model with `mlx_lm.fuse --model MODEL --adapter-path FOLDER`, and give the "
    "folder that this writes"
)


def check(config: Config) -> list[str]:
    """Look for an adapter in the model's folder.

    Returns:
        A sentence if there is one that will be left aside.

    Raises:
        ConfigError: the folder is an adapter, no model; or the model is split over ranks.
    """
    try:
        folder = Path(config.model.path).expanduser()
        found = next((name for name in FILES if (folder / name).is_file()), None)
        is_model = (folder / "config.json").is_file()
    except (OSError, RuntimeError):
        # Whoever loads the model says why it cannot be read.
        return []
    if found is None:
        return []
    if not is_model:
        raise ConfigError(
            f"model.path {folder} is an adapter (LoRA: it holds {found}), no model: {_REMEDY}."
        )
    if config.backend != "off":
        raise ConfigError(
            f"The model folder {folder} holds an adapter ({found}), and adapters cannot be used "
            f"with several ranks: {_REMEDY}, or take the file away."
        )
    return [f"The model folder {folder} holds an adapter ({found}), which is not used: {_REMEDY}."]
