"""The location of a model: the built-in demo, a local folder, or the Hugging Face hub."""

from pathlib import Path

from shared.errors import ConfigError
from shared.os import user_folders

DEMO = "demo"
"""The name of the built-in model."""


def demo_folder() -> Path:
    """Return the built-in model's folder, in a checkout or in an installed wheel.

    Raises:
        ConfigError: when this installation has no demo model.
    """
    shared = Path(__file__).resolve().parents[1]
    for folder in (shared / "models" / "demo", shared.parent / "models" / "demo"):
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError("This installation has no built-in model: set model.path.")


def local_folder(path: str) -> Path | None:
    """Return the local folder of a model; None when `path` is a Hugging Face id.

    Raises:
        ConfigError: when `path` looks like a folder but does not exist, or holds no model.
    """
    if path == DEMO:
        return demo_folder()
    folder = user_folders.expand(path, "model.path")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"The folder {folder} has no config.json, so it is not a model.")
        return folder
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local or folder.exists():
        raise ConfigError(
            f"There is no model folder {path}: set model.path to a folder with config.json, "
            "or to a Hugging Face id such as mlx-community/Qwen3-4B-4bit."
        )
    return None
