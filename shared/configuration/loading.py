"""Loading of settings from file, environment and flags. Owns precedence, merging and checking.

Precedence, highest first: flags, environment (`LOCKSTEP_<SECTION>_<KEY>`), file, defaults. An
unknown key or a value out of range is a ConfigError that names it.
"""

import dataclasses
import os
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Struct

from shared import limits
from shared.configuration import hostfile, world_addresses
from shared.configuration.host_addresses import is_loopback
from shared.configuration.setting_rules import check_consistency
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.os import run_folder, user_folders

_MODELS = ("model.path", "speculation.draft_model")
_PATHS = (
    *_MODELS, "paths.run_dir", "paths.keys_dir", "gateway.api_keys_file", "world.hostfile",
    "world.jaccl_devices", "cache.directory", "log.directory",
)  # fmt: skip
"""Settings that name a file or a folder."""

API_KEYS_VARIABLE = "LOCKSTEP_API_KEYS"
"""Variable with API keys (name=key,name=key), for containers and other places without a file."""


def load_config(
    file: str | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Merge flags, environment, file and defaults, in this precedence, and check the result.

    Args:
        file: path of a TOML file, or None.
        flags: dotted keys and values, for example {"world.size": 2}. None values are ignored.
        environment: variables; those named LOCKSTEP_<SECTION>_<KEY> are used. Lists are separated
            by commas. None: no variables.

    Raises:
        ConfigError: when a setting is wrong; names the key and the allowed values.
    """
    environment = environment or {}
    tree = read_toml(file, "configuration") if file else {}
    overrides: dict[str, Any] = dict(_environment_keys(environment))
    overrides |= {key: value for key, value in (flags or {}).items() if value is not None}
    for key, value in overrides.items():
        _set(tree, key, value)
    _follow_hostfile(tree, is_size_set="world.size" in overrides)
    return config_from_tree(tree, has_api_keys=bool(environment.get(API_KEYS_VARIABLE)))


def config_from_tree(tree: dict[str, Any], *, has_api_keys: bool = False) -> Config:
    """Convert nested dictionaries to a Config; check types, ranges and rules across settings.

    Args:
        tree: section -> key -> value.
        has_api_keys: the environment contains API keys, so that other machines may be served.

    Raises:
        ConfigError: as `load_config`.
    """
    try:
        config = msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_sentence(str(error))) from None
    if not (config.gateway.api_keys_file or has_api_keys):
        _check_unreachable(config.gateway.host)
    check_consistency(config)
    return config


def change_config(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return settings with some of them changed; check the result.

    A new hostfile also gives the number of ranks and the backend, unless they are among the
    changes.

    Args:
        config: the settings of a Lockstep that runs. It may have API keys in its environment.
        changes: dotted keys and values.

    Raises:
        ConfigError: as `load_config`.
    """
    tree: dict[str, Any] = msgspec.to_builtins(config)
    if "world.hostfile" in changes:
        for key in ("size", "backend"):
            tree["world"].pop(key)
    for key, value in changes.items():
        _set(tree, key, value)
    _follow_hostfile(tree, is_size_set="world.size" in changes)
    return config_from_tree(tree, has_api_keys="gateway.host" not in changes)


def with_absolute_paths(config: Config, folder: Path) -> Config:
    """Return settings whose relative paths do not depend on the working folder.

    Args:
        config: the settings.
        folder: the working folder to which they are relative.
    """
    tree: dict[str, Any] = msgspec.to_builtins(config)
    for key in _PATHS:
        section, _, name = key.partition(".")
        text = tree[section][name]
        path = folder / text
        # The name of a model may also be that of one on Hugging Face.
        is_path = key not in _MODELS or path.is_dir()
        if text and is_path and not text.startswith("~"):
            tree[section][name] = str(path)
    return msgspec.convert(tree, Config)


@dataclasses.dataclass(frozen=True, slots=True)
class WorldFiles:
    """Contents of hostfile and device matrix, and which of their settings have no effect."""

    hostfile: str
    """Content of world.hostfile; "" without one."""
    jaccl_devices: str
    """Content of world.jaccl_devices; "" without one."""
    ignored_settings: list[str]
    """One sentence per setting in the files that has no effect."""


def read_world_files(config: Config) -> WorldFiles:
    """Read the files with the ranks' addresses and devices, and check their content.

    The checks are those of `world_addresses.check_addresses`.

    Raises:
        ConfigError: when a file cannot be read or contradicts the settings.
    """
    if config.backend == "off":
        return WorldFiles("", "", [])
    hosts = read_text(config.world.hostfile, "world.hostfile")
    devices = read_text(config.world.jaccl_devices, "world.jaccl_devices")
    return WorldFiles(hosts, devices, world_addresses.check_addresses(config, hosts, devices))


def prepare_run_dir(config: Config) -> Path:
    """Create the run folder with mode 0700, or check an existing one; return it.

    Raises:
        ConfigError: when it cannot be created, its sockets' paths would be too long, or other users
            can access or replace it.
    """
    folder = config.run_dir
    for address in (config.gateway_address, config.rank_address, config.store_address):
        scheme, _, path = address.partition("://")
        if scheme == "ipc" and len(os.fsencode(path)) > limits.IPC_PATH_BYTES_MAX:
            raise ConfigError(
                f"The path of the socket {path} is longer than {limits.IPC_PATH_BYTES_MAX} bytes, "
                "which the system does not allow: set paths.run_dir to a shorter folder."
            )
    return run_folder.prepare(folder)


def environment_name(section: str, key: str) -> str:
    """Return the name of the variable that overrides a setting: LOCKSTEP_<SECTION>_<KEY>."""
    return f"LOCKSTEP_{section}_{key}".upper()


def overriding_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that override settings: name -> "section.key"."""
    return {
        name: f"{section}.{key}"
        for section, struct in sections().items()
        for key in struct.__struct_fields__
        if (name := environment_name(section, key)) in environment
    }


def sections() -> dict[str, type[Struct]]:
    """Return section name -> struct with its settings, in the order of Config."""
    return {field.name: field.type for field in msgspec.structs.fields(Config)}


def read_toml(file: str, kind: str) -> dict[str, Any]:
    """Return the content of a TOML file.

    Args:
        file: its path.
        kind: "configuration" or "inventory", for errors.

    Raises:
        ConfigError: when it cannot be read or is not valid.
    """
    try:
        with Path(file).open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"Cannot read the {kind} {file}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The {kind} {file} is not valid TOML: {error}.") from None


def read_text(file: str, key: str) -> str:
    """Return the content of a file that a setting names; "" without a file.

    Args:
        file: its path.
        key: the setting, for errors.

    Raises:
        ConfigError: when it cannot be read.
    """
    if not file:
        return ""
    path = user_folders.expand(file, key)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"Cannot read {key} {path}: {cause}.") from None


def _follow_hostfile(tree: dict[str, Any], *, is_size_set: bool) -> None:
    """Take the number of ranks and the backend from world.hostfile where they are not set.

    Raises:
        ConfigError: when one rank is requested but the file has several, or it cannot be read.
    """
    world = tree.get("world")
    file = world.get("hostfile") if isinstance(world, dict) else None
    if not isinstance(world, dict) or not isinstance(file, str) or not file:
        return
    is_backend_unset = world.get("backend", "auto") == "auto"
    # A size of 1 may come from a configuration file that lists the defaults.
    is_one = str(world.get("size", 1)).strip() == "1"
    if world.get("backend") == "off" or not (is_one or is_backend_unset):
        return
    hosts = hostfile.parse(read_text(file, "world.hostfile"))
    if is_one and not is_size_set:
        world["size"] = hosts.size
    elif is_one and hosts.size > 1:
        raise ConfigError(
            f"world.hostfile {file} is for {hosts.size} ranks, but world.size is 1: remove "
            "world.size (--ranks), or set world.backend to off for one rank without the others."
        )
    if is_backend_unset and hosts.backend and hosts.size > 1:
        world["backend"] = hosts.backend


def _check_unreachable(host: str) -> None:
    """Refuse an address of a gateway without API keys that other machines can reach.

    Raises:
        ConfigError: when they can reach it, or it is no address and no name that resolves to one.
    """
    if is_loopback(host):
        return
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ConfigError(
            f"gateway.host is {host}, which is not an address and does not resolve to one on this "
            "machine: write an address of this machine, or 127.0.0.1."
        ) from None
    if not all(is_loopback(str(address[0])) for *_, address in found):
        raise ConfigError(
            f"gateway.host is {host}, which other machines can reach, so clients need API keys: "
            "set gateway.api_keys_file and create a key with `lockstep api-key new NAME`, or use "
            "127.0.0.1."
        )


def _environment_keys(environment: Mapping[str, str]) -> dict[str, str | list[str]]:
    keys = overriding_variables(environment)
    found: dict[str, str | list[str]] = {}
    prefixes = tuple(f"LOCKSTEP_{section}_".upper() for section in sections())
    for name, value in environment.items():
        if key := keys.get(name):
            is_list = get_origin(_setting_type(key)) is list
            found[key] = [part for part in value.split(",") if part] if is_list else value
        elif name.startswith(prefixes):
            raise ConfigError(f"The environment variable {name} is not a setting.")
    return found


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    branch = tree.setdefault(section, {})
    if not isinstance(branch, dict):
        raise ConfigError(f"The setting {section} must be a section, not {branch!r}.")
    branch[name] = value


def _sentence(error: str) -> str:
    """Turn msgspec's "Expected ... - at `$.world.size`" into a sentence that starts with a key."""
    text, _, place = error.partition(" - at ")
    key = place.strip("`").removeprefix("$.").removeprefix("$")
    if "unknown field" in text:
        name = text.rsplit("`", 2)[-2]
        return f"Unknown setting {f'{key}.{name}' if key else name}."
    kind = _setting_type(key)
    if get_origin(kind) is Literal:
        choices = ", ".join(map(str, get_args(kind)))
        wrong = text.removeprefix("Invalid enum value ")
        if wrong != text:
            return f"Setting {key}: {wrong} is not one of {choices}."
        return f"Setting {key}: {text[:1].lower() + text[1:]}; it is one of {choices}."
    return f"Setting {key or 'file'}: {text[:1].lower() + text[1:]}."


def _setting_type(key: str) -> Any:
    """Return the type of a setting without its limits; None if there is no such setting."""
    section, _, name = key.partition(".")
    struct = sections().get(section)
    fields = msgspec.structs.fields(struct) if struct else ()
    kind = next((field.type for field in fields if field.name == name), None)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind
