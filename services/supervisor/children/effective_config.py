"""Files from which the children start: the supervisor's merged settings. Owns their format."""

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import structs

from shared.configuration.host_share import DEVICES_FILE
from shared.configuration.loading import overriding_variables, read_text
from shared.configuration.settings import Config
from shared.os import run_folder

FILE_NAME = "config.toml"

_COPIES = {"hostfile": "hostfile.json", "jaccl_devices": DEVICES_FILE}
"""Setting of the world that names a file -> name of its copy in the run folder."""

_MODE = 0o600
_NO_FILES: Mapping[str, str] = MappingProxyType({})


def as_toml(config: Config) -> str:
    """Return the settings as TOML, with every key present and `paths.run_dir` as a path."""
    tree: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    tree["paths"]["run_dir"] = str(config.run_dir)
    lines = []
    for section, values in tree.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_literal(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


class RunFiles:
    """Files in the run folder that children read at their start, held in memory.

    They are the merged settings and copies of the hostfile and the matrix of RDMA devices, so that
    a child restarts even if all of them were deleted, in the run folder or where they came from.
    """

    def __init__(self, config: Config, folder: Path, files: Mapping[str, str] = _NO_FILES) -> None:
        """Read the files that the settings name; `restore` writes all of them.

        Args:
            config: the settings.
            folder: the run folder.
            files: path -> content of further files.

        Raises:
            ConfigError: when a file that the settings name cannot be read.
        """
        self._folder = folder
        self._texts = {Path(path): text for path, text in files.items()}
        copies = {}
        for key, name in _COPIES.items():
            path = getattr(config.world, key)
            if path and path not in files:
                self._texts[folder / name] = read_text(path, f"world.{key}")
                copies[key] = str(folder / name)
        if copies:
            config = structs.replace(config, world=structs.replace(config.world, **copies))
        self.config_file = folder / FILE_NAME
        """The file with the settings."""
        self._texts[self.config_file] = as_toml(config)

    def restore(self) -> None:
        """Write the files that are missing or different, with mode 0600, and a missing folder.

        Raises:
            OSError: when a file cannot be written, for example on a full disk.
            ConfigError: when the folder cannot be used.
        """
        run_folder.prepare(self._folder)
        for path, text in self._texts.items():
            _restore(path, text)


def _restore(path: Path, text: str) -> None:
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        if stat.S_IMODE(path.lstat().st_mode) == _MODE and path.read_text("utf-8") == text:
            return
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)


def without_overrides(environment: dict[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that override settings.

    The file contains their values already. In a child they would take precedence over it, and so
    over the supervisor's flags.
    """
    overrides = overriding_variables(environment)
    return {name: value for name, value in environment.items() if name not in overrides}


def _literal(value: Any) -> str:
    if isinstance(value, str):
        # TOML's basic strings equal JSON's except for escaped surrogate pairs and a bare DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
