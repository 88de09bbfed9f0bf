"""`lockstep api-key new|list|remove`: makes, names and withdraws API keys; returns what to print.

A running gateway reads the file again when it has changed.
"""

import argparse
from pathlib import Path

from services.gateway.http import api_keys
from services.gateway.http.api_keys import ApiKey
from shared.configuration.settings import Config
from shared.errors import ConfigError, UsageError
from shared.os import private_files

_HEADER = "# API keys of Lockstep: name, salt, digest (see `lockstep api-key --help`).\n"


def add_arguments(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Give `lockstep api-key` its actions; return their parsers."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    make = actions.add_parser("new", help="make a key and print it, once")
    make.add_argument("name", metavar="NAME", help="whose key it is; names its share of the cache")
    tell = actions.add_parser("list", help="print the names of the keys")
    withdraw = actions.add_parser("remove", help="let a key count no more")
    withdraw.add_argument("name", metavar="NAME", help="its name")
    return [make, tell, withdraw]


def run(config: Config, options: argparse.Namespace) -> str:
    """Do what the command line says; return what to print.

    Raises:
        ConfigError: `gateway.api_keys_file` is not set, or the file cannot be used.
        UsageError: the name is none, is taken, or is not known.
    """
    path = api_keys.key_file(config.gateway)
    if path is None:
        raise ConfigError(
            "gateway.api_keys_file is not set: set it in the configuration (--config) or as "
            "LOCKSTEP_GATEWAY_API_KEYS_FILE."
        )
    match options.action:
        case "new":
            return new(path, options.name)
        case "list":
            return names(path)
        case _:
            return remove(path, options.name)


def new(path: Path, name: str) -> str:
    """Make a key and return it; it is stored nowhere. Raises as `run`."""
    if not api_keys.is_name(name):
        raise UsageError(
            "A key's name is 1 to 64 letters, digits, dots, hyphens or underscores, and begins "
            "with a letter or digit."
        )
    with private_files.locked(path.parent):
        text = api_keys.read(path) if path.exists() else _HEADER
        keys = api_keys.parse(text, path)
        if any(key.name == name for key in keys):
            raise UsageError(
                f"There is a key named {name}: remove it with `lockstep api-key remove {name}`, or "
                "choose another name."
            )
        if len(keys) >= api_keys.KEYS_MAX:
            raise ConfigError(f"{path} holds {api_keys.KEYS_MAX:,} keys, and may not hold more.")
        secret = api_keys.make_secret()
        ending = "" if text.endswith("\n") or not text else "\n"
        private_files.replace(path, f"{text}{ending}{ApiKey.of(name, secret).line()}\n")
    return f"{secret}\n\nThis is the key of {name}. It is shown once: {path} holds its digest only."


def names(path: Path) -> str:
    """Return the names of the keys, one per line. Raises as `run`."""
    keys = api_keys.parse(api_keys.read(path), path)
    return "\n".join(key.name for key in keys) or "There are no keys."


def remove(path: Path, name: str) -> str:
    """Take a key away; a running gateway refuses it about a second later. Raises as `run`."""
    with private_files.locked(path.parent):
        text = api_keys.read(path)
        if name not in {key.name for key in api_keys.parse(text, path)}:
            raise UsageError("There is no key of that name: see `lockstep api-key list`.")
        lines = [line for line in text.splitlines() if line.split()[:1] != [name]]
        private_files.replace(path, "".join(f"{line}\n" for line in lines))
    return f"The key of {name} counts no more."
