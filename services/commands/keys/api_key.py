"""Command `lockstep api-key`. Owns changes of the file of API keys; the gateway only reads it."""

from pathlib import Path

import click

from services.commands.cli.click_support import Group
from services.commands.cli.flags import SettingSources, settings_options
from services.gateway.http import api_keys
from services.gateway.http.api_keys import ApiKey
from shared import limits
from shared.errors import ConfigError, UsageError
from shared.os import private_files
from shared.os.standard_streams import print_line

_HEADER = "# API keys of Lockstep: name, salt, digest (see `lockstep api-key --help`).\n"


@click.group(name="api-key", cls=Group)
def api_key() -> None:
    """Make, list and remove API keys of clients.

    A running gateway reads the file of keys again when it has changed.
    """


@api_key.command(name="new")
@click.argument("name")
@click.option(
    "--weight",
    type=click.FloatRange(limits.WEIGHT_MIN, limits.WEIGHT_MAX),
    default=1.0,
    show_default=True,
    help="Share of the server while others wait too: 2 gets twice as much as 1.",
)
@settings_options
def new_command(sources: SettingSources, *, name: str, weight: float) -> None:
    """Make a key and print it, once.

    NAME says whose key it is, and names its part of the cache.
    """
    print_line(new(_key_file(sources), name, weight))


@api_key.command(name="list")
@settings_options
def list_command(sources: SettingSources) -> None:
    """Print the names of the keys, with weights other than 1."""
    print_line(names(_key_file(sources)))


@api_key.command(name="remove")
@click.argument("name")
@settings_options
def remove_command(sources: SettingSources, *, name: str) -> None:
    """Remove the key of this NAME."""
    print_line(remove(_key_file(sources), name))


def new(path: Path, name: str, weight: float = 1.0) -> str:
    """Make an API key and add its digest to the file of keys.

    Args:
        path: the file of keys.
        name: name of the key.
        weight: share of its requests among those of all keys.

    Returns:
        A text that shows the key, which is not stored anywhere.

    Raises:
        UsageError: when the name is malformed or taken.
        ConfigError: when the file cannot be used or is full.
    """
    if not api_keys.is_valid_name(name):
        raise UsageError(
            "A key's name is 1 to 64 letters, digits, dots, hyphens or underscores, and begins "
            "with a letter or digit."
        )
    with private_files.locked(path.parent):
        text = api_keys.read_file(path) if path.exists() else _HEADER
        keys = api_keys.parse_file(text, path)
        if any(key.name == name for key in keys):
            raise UsageError(
                f"A key named {name} exists: remove it with `lockstep api-key remove {name}`, or "
                "choose another name."
            )
        if len(keys) >= api_keys.KEYS_MAX:
            raise ConfigError(
                f"{path} holds {api_keys.KEYS_MAX:,} keys, which is the maximum: remove one first."
            )
        secret = api_keys.generate_secret()
        ending = "" if text.endswith("\n") or not text else "\n"
        private_files.replace(path, f"{text}{ending}{ApiKey.of(name, secret, weight).line()}\n")
    return f"{secret}\n\nThis is the key of {name}. It is shown once: {path} holds its digest only."


def names(path: Path) -> str:
    """Return the names of the API keys in the file at `path`, one per line, with unequal weights.

    Raises:
        ConfigError: when the file cannot be used.
    """
    keys = api_keys.parse_file(api_keys.read_file(path), path)
    lines = [
        key.name if key.weight == 1.0 else f"{key.name} (weight {key.weight:g})" for key in keys
    ]
    return "\n".join(lines) or "There are no keys."


def remove(path: Path, name: str) -> str:
    """Remove an API key from the file of keys; a running gateway refuses it about a second later.

    Args:
        path: the file of keys.
        name: name of the key.

    Returns:
        A sentence that confirms it.

    Raises:
        UsageError: when no key has this name.
        ConfigError: when the file cannot be used.
    """
    with private_files.locked(path.parent):
        text = api_keys.read_file(path)
        if name not in {key.name for key in api_keys.parse_file(text, path)}:
            raise UsageError("No key has that name: see `lockstep api-key list`.")
        lines = [line for line in text.splitlines() if line.split()[:1] != [name]]
        private_files.replace(path, "".join(f"{line}\n" for line in lines))
    return f"The key of {name} is removed."


def _key_file(sources: SettingSources) -> Path:
    """Return the file of keys. Raises: ConfigError: `gateway.api_keys_file` is not set."""
    path = api_keys.key_file(sources.share().config.gateway)
    if path is None:
        raise ConfigError(
            "gateway.api_keys_file is not set: set it in the configuration (--config) or as "
            "LOCKSTEP_GATEWAY_API_KEYS_FILE."
        )
    return path
