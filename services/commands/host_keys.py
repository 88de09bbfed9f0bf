"""`lockstep keys new|show|allow|remove`: this host's key pair, and who may speak with which.

Each function returns what to print.
"""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from shared.errors import ConfigError, UsageError
from shared.os import private_files
from shared.transport import keys, sockets
from shared.transport.keys import AllowedPeer

OWN_NAME = "this-host"
"""Name under which `new` allows this host's own key, so that its processes reach each other."""

_HEADER = (
    "# Keys that may speak to this host: public key, name, roles (see `lockstep keys --help`).\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Give `lockstep keys` its actions; return their parsers."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    make = actions.add_parser("new", help="make this host's key pair")
    make.add_argument("--force", action="store_true", help="replace the pair that there is")
    tell = actions.add_parser("show", help="this host's public key, and who is allowed")
    tell.add_argument("--json", action="store_true", help="as one JSON object")
    let = actions.add_parser("allow", help="let a key speak to this host")
    let.add_argument("public_key", metavar="PUBLIC_KEY", help="as its host's `keys show` says it")
    let.add_argument("name", metavar="NAME", help="a name for it")
    let.add_argument(
        "--role",
        metavar="ROLE",
        action="append",
        required=True,
        help="as what, may be repeated: "
        + "; ".join(f"{role} ({what})" for role, what in keys.ROLES.items()),
    )
    forbid = actions.add_parser("remove", help="let a key speak no more")
    forbid.add_argument("name", metavar="NAME", help="its name")
    return [make, tell, let, forbid]


def run(folder: Path, options: argparse.Namespace) -> str:
    """Do what the command line says; return what to print. Raises as the functions below."""
    match options.action:
        case "new":
            return new(folder, force=options.force)
        case "show":
            return show(folder, as_json=options.json)
        case "allow":
            return allow(folder, options.public_key, options.name, options.role)
        case _:
            return remove(folder, options.name)


def new(folder: Path, *, force: bool = False) -> str:
    """Make this host's key pair and allow it on this host.

    Raises:
        ConfigError: there is one already and `force` is not set, or the folder cannot be used.
    """
    with _locked(folder):
        path = folder / keys.SECRET_FILE
        if path.exists() and not force:
            raise ConfigError(
                f"This host has a key pair in {folder}: `lockstep keys show` prints its public "
                "key; --force replaces it, and then every host must allow the new one."
            )
        lines = _lines(folder, without=OWN_NAME) or [_HEADER]
        public, secret = sockets.new_key_pair()
        own = AllowedPeer(public, OWN_NAME, frozenset(keys.ROLES))
        # The old public key first: until the new one stands, none is better than a wrong one.
        (folder / keys.PUBLIC_FILE).unlink(missing_ok=True)
        private_files.replace(path, f"{secret}\n")
        private_files.replace(folder / keys.PUBLIC_FILE, f"{public}\n")
        private_files.replace(folder / keys.ALLOWED_FILE, "".join([*lines, f"{own.line()}\n"]))
    return f"Made a key pair in {folder}.\n\n{_instructions(public)}"


def show(folder: Path, *, as_json: bool = False) -> str:
    """Return this host's public key and the allowed peers; the secret key never.

    Raises:
        ConfigError: there are no keys, or they cannot be used.
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
        return msgspec.json.format(msgspec.json.encode(facts)).decode()
    width = max((len(peer.name) for peer in peers), default=0)
    lines = [
        f"{peer.name:{width}}  {peer.public_key}  {', '.join(sorted(peer.roles))}" for peer in peers
    ]
    table = "\n".join(lines) if lines else "nobody"
    return f"Keys in {folder}.\n\n{_instructions(own.public)}\n\nAllowed here:\n{table}"


def allow(folder: Path, public_key: str, name: str, roles: Sequence[str]) -> str:
    """Allow a key to speak under `roles`, in addition to those that it has.

    Raises:
        UsageError: key, name or role is none.
        ConfigError: name or key is taken by another line, or the folder cannot be used.
    """
    try:
        peer = keys.make_peer(public_key, name, roles)
    except ValueError as error:
        raise UsageError(f"The peer {error}.") from None
    with _locked(folder):
        if public_key == keys.read_secret(folder):
            raise UsageError("That is this host's secret key: give nobody that one.")
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
    return f"{name} may speak to this host as: {', '.join(sorted(peer.roles))}."


def remove(folder: Path, name: str) -> str:
    """Allow the key with this name no more; its sessions end within about a second.

    Raises:
        ConfigError: no key has this name, or the folder cannot be used.
    """
    with _locked(folder):
        if name not in {peer.name for peer in keys.read_allowed(folder).values()}:
            raise ConfigError(f"Nobody is allowed as {name[:64]}: see `lockstep keys show`.")
        private_files.replace(folder / keys.ALLOWED_FILE, "".join(_lines(folder, without=name)))
    return f"{name} may not speak to this host any more."


def _instructions(public: str) -> str:
    # No key has a quote in it, but most have characters that a shell would interpret.
    return (
        f"This host's public key is {public}\n"
        f"Where this host's processes dial: lockstep keys allow '{public}' NAME --role ROLE"
    )


def _lines(folder: Path, *, without: str) -> list[str]:
    """Return the lines of `allowed` with comments, less the one of the peer `without`."""
    text = keys.read_allowed_text(folder)
    peers = keys.parse_allowed(text, folder / keys.ALLOWED_FILE)
    dropped = {peer.public_key for peer in peers.values() if peer.name == without}
    return [f"{line}\n" for line in text.splitlines() if not dropped.intersection(line.split()[:1])]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other `lockstep keys` out of the folder, which nobody else may enter."""
    with private_files.locked(folder):
        keys.check_folder(folder)
        yield
