"""Key files of one host: its own key pair and the list of allowed peers. Owns their formats.

A folder with mode 0700 contains `secret` (mode 0600), `public` for copying, and `allowed` with one
line per peer: public key, name, roles. A key has 40 characters of Z85 (ZeroMQ's RFC 32).
"""

import dataclasses
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from shared.errors import ConfigError
from shared.os import private_files
from shared.os.private_files import Signature

SECRET_FILE = "secret"  # noqa: S105 - a file's name
PUBLIC_FILE = "public"
ALLOWED_FILE = "allowed"

DIALLING_ROLES: Mapping[str, str] = {
    "gateway": "a gateway, to the scheduler and its host's cache store",
    "rank": "a rank worker, to the scheduler",
    "status": "`lockstep status` and `lockstep up`, to the scheduler",
    "operator": "`lockstep drain`, to the scheduler",
    "store-client": "a rank worker, to its cache store",
    "cache": "`lockstep cache`, to a cache store",
}
LISTENING_ROLES: Mapping[str, str] = {
    "scheduler": "the scheduler, to its gateways, ranks and commands",
    "store": "a cache store, to its rank workers, gateways and commands",
}
ROLES: Mapping[str, str] = {**DIALLING_ROLES, **LISTENING_ROLES}
"""Role -> the process that speaks in it, and its peers."""

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_IDENTITY = re.compile(rb"([a-z-]+?)(?:-[0-9]{1,3})?-[0-9a-f]{1,16}")


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """A host's own key pair and its folder."""

    folder: Path
    public: str
    secret: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class AllowedPeer:
    """A peer that may connect, from one line of the file `allowed`."""

    public_key: str
    name: str
    roles: frozenset[str]
    """Roles as which it may speak, see ROLES."""

    def line(self) -> str:
        """Return the peer as a line of the file: `<public key> <name> <role>,<role>`."""
        in_order = [role for role in ROLES if role in self.roles]
        return f"{self.public_key} {self.name} {','.join(in_order)}"


def is_key(text: str) -> bool:
    """Tell whether `text` is 32 bytes in Z85: eight groups of five digits, each below 2**32."""
    if len(text) != 40 or any(character not in _Z85 for character in text):
        return False
    digits = [_Z85.index(character) for character in text]
    groups = (digits[start : start + 5] for start in range(0, 40, 5))
    return all(
        sum(digit * 85**power for digit, power in zip(group, (4, 3, 2, 1, 0), strict=True)) < 2**32
        for group in groups
    )


def role_of(identity: bytes) -> str | None:
    """Return the role in a routing identity, None if it has none.

    An identity consists of a role, for ranks a number, and an incarnation in hexadecimal digits:
    `rank-3-1f00d5eed`.
    """
    match = _IDENTITY.fullmatch(identity)
    role = match[1].decode() if match else ""
    return role if role in DIALLING_ROLES else None


def read_secret(folder: Path) -> str | None:
    """Return this host's secret key, None if it has none.

    Raises:
        ConfigError: when other users can access the key, or the file contains none. The text
            contains the remedy, never the key.
    """
    path = folder / SECRET_FILE
    if not path.exists():
        return None
    check_folder(folder)
    text = private_files.read(path, not_allowed=0o077, remedy="chmod 600").strip()
    if not is_key(text):
        raise ConfigError(
            f"{path} contains no secret key: restore it, or make a new pair with "
            "`lockstep keys new --force`."
        )
    return text


def check_folder(folder: Path) -> None:
    """Check that a folder of keys is accessible to its owner only. Raises ConfigError."""
    try:
        facts = folder.stat()
    except OSError as error:
        raise ConfigError(f"Cannot use the folder of keys {folder}: {error.strerror}.") from None
    if not stat.S_ISDIR(facts.st_mode):
        raise ConfigError(f"{folder}, the folder of keys, is a file: set paths.keys_dir.")
    private_files.check_owner(folder, facts, not_allowed=0o077, remedy="chmod 700")


def read_public(folder: Path) -> str | None:
    """Return the text of the file `public`, None without it. Raises ConfigError if unreadable."""
    path = folder / PUBLIC_FILE
    if not path.exists():
        return None
    return private_files.read(path, not_allowed=0o022, remedy="chmod 644").strip()


def read_allowed(folder: Path) -> dict[str, AllowedPeer]:
    """Return the allowed peers by public key, {} without the file.

    Raises:
        ConfigError: when other users can write the file, or a line is malformed.
    """
    path = folder / ALLOWED_FILE
    return parse_allowed(read_allowed_text(folder), path)


def read_allowed_text(folder: Path) -> str:
    """Return the text of the file `allowed`, which lists admitted public keys; "" without it.

    Args:
        folder: folder of this host's keys.

    Raises:
        ConfigError: when the file cannot be read, or other users can write to it.
    """
    path = folder / ALLOWED_FILE
    if not path.exists():
        return ""
    return private_files.read(path, not_allowed=0o022, remedy="chmod 600")


def parse_allowed(text: str, path: Path) -> dict[str, AllowedPeer]:
    """Return the allowed peers in the text of a file `allowed`, by public key.

    Args:
        text: the text. Empty lines and lines that begin with # are skipped.
        path: the file, for errors.

    Raises:
        ConfigError: when a line is malformed. Names file and line, but no key, which might be
            secret.
    """
    peers: dict[str, AllowedPeer] = {}
    lines_of_names: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            # No key starts with "#": its first five digits would be 2**32 or more.
            continue
        try:
            peer = _parse_line(line)
            if peer.public_key in peers:
                raise ValueError(f"has the same key as {peers[peer.public_key].name}")
            if peer.name in lines_of_names:
                raise ValueError(f"has the same name as line {lines_of_names[peer.name]}")
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}, {error}.") from None
        peers[peer.public_key] = peer
        lines_of_names[peer.name] = number
    return peers


def make_peer(public_key: str, name: str, roles: Iterable[str]) -> AllowedPeer:
    """Return an allowed peer, after checking the form of its parts.

    Args:
        public_key: 40 characters of Z85.
        name: 1 to 64 letters, digits, dots, hyphens and underscores.
        roles: one or more keys of ROLES.

    Raises:
        ValueError: when a part is invalid. The text continues a sentence and contains no key.
    """
    if not is_key(public_key):
        raise ValueError("has no public key of 40 Z85 characters")
    if not _NAME.fullmatch(name):
        raise ValueError("has a name that is not 1 to 64 letters, digits, dots, hyphens")
    found = frozenset(roles)
    if unknown := sorted(found - ROLES.keys()):
        raise ValueError(f"has the unknown role {unknown[0][:40]!r}: use {', '.join(ROLES)}")
    if not found:
        raise ValueError("has no role")
    return AllowedPeer(public_key, name, found)


def signature(folder: Path) -> Signature:
    """Return inode, size and times of the file `allowed`, by which a change is detected."""
    return private_files.signature(folder / ALLOWED_FILE)


def _parse_line(line: str) -> AllowedPeer:
    fields = line.split()
    if len(fields) != 3:
        raise ValueError(f"has {len(fields)} fields instead of 3: public key, name, roles")
    return make_peer(fields[0], fields[1], [role for role in fields[2].split(",") if role])
