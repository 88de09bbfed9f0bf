"""Command `lockstep keys`. Owns changes of this host's key pair and of its list of allowed keys."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from services.commands.checks.text_table import table_lines
from services.commands.cli.click_support import Group, json_option, json_text
from services.commands.cli.flags import SettingSources, source_options
from shared.errors import ConfigError, UsageError
from shared.os import private_files
from shared.os.standard_streams import print_line
from shared.transport import keys, sockets
from shared.transport.keys import AllowedPeer

OWN_NAME = "this-host"
"""Name under which `new` allows this host's own key, so that its processes can connect."""

_HEADER = (
    "# Keys that may connect to this host: public key, name, roles (see `lockstep keys --help`).\n"
)


@click.group(name="keys", cls=Group)
def keys_group() -> None:
    """Make this host's key pair and allow the keys of other hosts."""


@keys_group.command(name="new")
@click.option("--force", is_flag=True, help="Replace the existing pair.")
@source_options
def new_command(sources: SettingSources, *, force: bool) -> None:
    """Make this host's key pair."""
    print_line(new(_folder(sources), force=force))


@keys_group.command(name="show")
@json_option
@source_options
def show_command(sources: SettingSources, *, as_json: bool) -> None:
    """Print this host's public key and the keys that it allows."""
    print_line(show(_folder(sources), as_json=as_json))


@keys_group.command(name="allow")
@click.argument("public_key")
@click.argument("name")
@click.option(
    "--role",
    "roles",
    metavar="ROLE",
    type=str,
    multiple=True,
    required=True,
    shell_complete=lambda _ctx, _param, start: [one for one in keys.ROLES if one.startswith(start)],
    help="What the key may be used for; repeatable: "
    + "; ".join(f"{role} ({what})" for role, what in keys.ROLES.items())
    + ".",
)
@source_options
def allow_command(
    sources: SettingSources, *, public_key: str, name: str, roles: tuple[str, ...]
) -> None:
    """Allow another host's key to connect to this host.

    PUBLIC_KEY is as `lockstep keys show` prints it on the other host; NAME is your name for it.
    """
    print_line(allow(_folder(sources), public_key, name, roles))


@keys_group.command(name="remove")
@click.argument("name")
@source_options
def remove_command(sources: SettingSources, *, name: str) -> None:
    """Stop allowing the key of this NAME."""
    print_line(remove(_folder(sources), name))


def new(folder: Path, *, force: bool = False) -> str:
    """Make this host's key pair, and allow it on this host for all roles.

    Args:
        folder: folder of the keys.
        force: whether an existing pair is replaced.

    Returns:
        A text with the public key, and how to allow it on other hosts.

    Raises:
        ConfigError: when a pair exists and `force` is not set, or the folder cannot be used.
    """
    with _locked(folder):
        path = folder / keys.SECRET_FILE
        if path.exists() and not force:
            raise ConfigError(
                f"This host already has a key pair in {folder}: `lockstep keys show` prints its "
                "public key; --force replaces it, and then every host must allow the new one."
            )
        lines = _lines(folder, without=OWN_NAME) or [_HEADER]
        public, secret = sockets.new_key_pair()
        own = AllowedPeer(public, OWN_NAME, frozenset(keys.ROLES))
        # The old public key is removed first: a missing key is better than one that does not match.
        (folder / keys.PUBLIC_FILE).unlink(missing_ok=True)
        private_files.replace(path, f"{secret}\n")
        private_files.replace(folder / keys.PUBLIC_FILE, f"{public}\n")
        private_files.replace(folder / keys.ALLOWED_FILE, "".join([*lines, f"{own.line()}\n"]))
    return f"Made a key pair in {folder}.\n\n{_instructions(public)}"


def show(folder: Path, *, as_json: bool = False) -> str:
    """Return this host's public key and the keys that it allows, never its secret key.

    Args:
        folder: folder of the keys.
        as_json: whether to return a JSON document instead of text.

    Raises:
        ConfigError: when there are no keys, or they cannot be used.
    """
    own = sockets.load_keys(folder)
    if own is None:
        raise ConfigError(f"This host has no keys in {folder}: make them with `lockstep keys new`.")
    peers = list(keys.read_allowed(folder).values())
    if as_json:
        facts = {
            "folder": str(folder),
            "public_key": own.public,
            "allowed": [
                {"public_key": peer.public_key, "name": peer.name, "roles": sorted(peer.roles)}
                for peer in peers
            ],
        }
        return json_text(facts)
    rows = [(peer.name, peer.public_key, ", ".join(sorted(peer.roles))) for peer in peers]
    table = "\n".join(table_lines(rows)) or "none"
    return f"Keys in {folder}.\n\n{_instructions(own.public)}\n\nAllowed here:\n{table}"


def allow(folder: Path, public_key: str, name: str, roles: Sequence[str]) -> str:
    """Allow another host's key to connect to this host, in addition to the roles that it has.

    Args:
        folder: folder of this host's keys.
        public_key: key of the other host.
        name: name for it in the list of allowed keys.
        roles: roles of processes with this key that may connect.

    Returns:
        A sentence that names all roles of the key.

    Raises:
        UsageError: when key, name or role is malformed.
        ConfigError: when the key is allowed by another name, the name stands for another key, or
            the folder cannot be used.
    """
    try:
        peer = keys.make_peer(public_key, name, roles)
    except ValueError as error:
        raise UsageError(f"The peer {error}.") from None
    with _locked(folder):
        if public_key == keys.read_secret(folder):
            raise UsageError(
                "That is this host's secret key, which must stay on this host: give a public key."
            )
        peers = keys.read_allowed(folder)
        before = peers.get(public_key)
        if before is not None and before.name != name:
            raise ConfigError(
                f"That key is allowed as {before.name}: use that name, or remove it first with "
                f"`lockstep keys remove {before.name}`."
            )
        if before is None and any(other.name == name for other in peers.values()):
            raise ConfigError(
                f"{name} is allowed with another key: remove that first with "
                f"`lockstep keys remove {name}`."
            )
        peer = AllowedPeer(public_key, name, peer.roles | (before.roles if before else set()))
        if peer != before:
            lines = _lines(folder, without=name) or [_HEADER]
            private_files.replace(folder / keys.ALLOWED_FILE, "".join([*lines, f"{peer.line()}\n"]))
    return f"{name} may connect to this host as: {', '.join(sorted(peer.roles))}."


def remove(folder: Path, name: str) -> str:
    """Remove a key from those that this host allows; its sessions end within about a second.

    Args:
        folder: folder of this host's keys.
        name: name of the key in the list of allowed keys.

    Returns:
        A sentence that confirms it.

    Raises:
        ConfigError: when no key has this name, or the folder cannot be used.
    """
    with _locked(folder):
        if name not in {peer.name for peer in keys.read_allowed(folder).values()}:
            raise ConfigError(f"No key is allowed as {name[:64]}: see `lockstep keys show`.")
        private_files.replace(folder / keys.ALLOWED_FILE, "".join(_lines(folder, without=name)))
    return f"{name} may no longer connect to this host."


def _instructions(public: str) -> str:
    # Quoted, because most keys have characters that a shell interprets; none has a quote.
    return (
        f"This host's public key is {public}\n"
        f"Allow it on each host that this host connects to: "
        f"lockstep keys allow '{public}' NAME --role ROLE"
    )


def _lines(folder: Path, *, without: str) -> list[str]:
    """Return the lines of `allowed`, comments included, except that of the peer `without`."""
    text = keys.read_allowed_text(folder)
    peers = keys.parse_allowed(text, folder / keys.ALLOWED_FILE)
    dropped = {peer.public_key for peer in peers.values() if peer.name == without}
    return [f"{line}\n" for line in text.splitlines() if not dropped.intersection(line.split()[:1])]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against another `lockstep keys`; check that only this user can enter it."""
    with private_files.locked(folder):
        keys.check_folder(folder)
        yield


def _folder(sources: SettingSources) -> Path:
    return sources.share().config.required_keys_dir
