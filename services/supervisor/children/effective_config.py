"""Configuration file for the children: the supervisor's merged settings. Owns its format."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from shared.configuration.loading import overriding_variables
from shared.configuration.settings import Config
from shared.errors import ConfigError

FILE_NAME = "config.toml"


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


def write(config: Config, folder: Path) -> Path:
    """Write the settings as TOML into `folder`/config.toml (mode 0600); return the file's path.

    Raises:
        ConfigError: when it cannot be written, for example on a full disk.
    """
    path = folder / FILE_NAME
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(as_toml(config))
    except OSError as error:
        raise ConfigError(
            f"Cannot write the roles' configuration {path}: {error.strerror}. Free space there, "
            "or set paths.run_dir."
        ) from None
    return path


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
