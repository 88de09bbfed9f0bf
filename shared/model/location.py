"""Where a model's files are: the built-in demo, a local folder, or Hugging Face's hub."""

from pathlib import Path

from shared.errors import ConfigError

DEMO = "demo"
"""The name of the built-in model."""


def demo_folder() -> Path:
    """Return the built-in model's folder, in a checkout or in an installed wheel.

    Raises:
        ConfigError: this installation has no demo model.
    """
    shared = Path(__file__).resolve().parents[1]
    for folder in (shared / "models" / "demo", shared.parent / "models" / "demo"):
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError("This installation has no built-in model: set model.path.")


def local_folder(path: str) -> Path | None:
    """Return the folder that `path` names on this machine, or None when it is a Hugging Face id.

    Raises:
        ConfigError: it looks like a folder but is none, or holds no model.
    """
    if path == DEMO:
        return demo_folder()
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"The folder {folder} holds no config.json, so it is no model.")
        return folder
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local or folder.exists():
        raise ConfigError(
            f"There is no model folder {path}: give a folder with config.json, "
            "or a Hugging Face id such as mlx-community/Qwen3-4B-4bit."
        )
    return None
