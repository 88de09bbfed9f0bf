"""Folders of this user: home, configuration, cache and state. Owns the error without a home."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import platformdirs

from shared.errors import ConfigError

_NAME = "lockstep"
_MACHINE_FILE = Path("/etc/machine-id")


def expand(path: str, setting: str) -> Path:
    """Return a path with a leading `~` or `~user` replaced by that user's home folder.

    Args:
        path: the path.
        setting: where it was given, such as `cache.directory`, for the error.

    Raises:
        ConfigError: when there is no such user or home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        name = path.partition("/")[0].removeprefix("~")
        cause = f"there is no user {name}" if name else f"there is no home folder ({_no_home()})"
        raise ConfigError(f"{setting} is {path}, but {cause}: write an absolute path.") from None


def config_folder(setting: str) -> Path:
    """Return this user's folder of Lockstep's configuration.

    Args:
        setting: the setting that makes the folder unnecessary, for the error.

    Raises:
        ConfigError: when this user has no home folder.
    """
    return _user_folder(platformdirs.user_config_path, setting)


def cache_folder(setting: str) -> Path:
    """Return this user's folder of Lockstep's cache; `setting` and error as in `config_folder`."""
    return _user_folder(platformdirs.user_cache_path, setting)


def run_folders(setting: str = "paths.run_dir") -> Path:
    """Return this user's folder of the default run folders on this machine.

    It is in the state folder, because nothing deletes files there. The system cleans temporary
    folders, and removes XDG_RUNTIME_DIR at the user's last logout. Home folders that several
    machines share have one such folder per machine.

    Args:
        setting: as in `config_folder`.

    Raises:
        ConfigError: when this user has no home folder.
    """
    folder = _user_folder(platformdirs.user_state_path, setting) / "run"
    try:
        machine = _MACHINE_FILE.read_text(encoding="ascii").strip()[:8]
    except (OSError, UnicodeDecodeError):
        machine = ""
    return folder / machine if machine.isalnum() else folder


def _user_folder(find: Callable[[str], Path], setting: str) -> Path:
    with contextlib.suppress(RuntimeError):
        folder = find(_NAME)
        # Without a home folder some versions of platformdirs return a path that begins with "~".
        if folder.is_absolute():
            return folder
    raise ConfigError(f"There is no home folder ({_no_home()}): set HOME or {setting}.")


def _no_home() -> str:
    return f"HOME is not set, and user {os.getuid()} is not in the user database"
