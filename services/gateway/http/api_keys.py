"""API keys of this gateway. Owns the format of the key file; only salted digests are stored.

`gateway.api_keys_file` has one line per key: name, salt and digest in hexadecimal, and the weight
if it is not 1. Generated keys have 256 random bits, so a fast salted hash (BLAKE2b) protects them
as well as a slow one, and a request costs about a microsecond per key. Keys from LOCKSTEP_API_KEYS
are never written to disk.
"""

import dataclasses
import hashlib
import hmac
import re
import secrets
from pathlib import Path

from shared import limits
from shared.clock import Clock
from shared.configuration.loading import API_KEYS_VARIABLE
from shared.configuration.settings import GatewayConfig
from shared.errors import ConfigError
from shared.log import Log
from shared.os import private_files, user_folders
from shared.os.private_files import Signature

RELOAD_INTERVAL_S = 1.0
"""Shortest time between two checks whether the file has changed."""
KEYS_MAX = 1_000
"""Keys of one gateway. A request is compared with all of them, which takes up to a millisecond."""
KEY_BYTES = 32
"""Random bytes of a generated key."""
KEY_CHARS_MIN = 20
"""Shortest key that LOCKSTEP_API_KEYS may hold."""
PREFIX = "lockstep-"
"""First characters of every generated key, so that people and secret scanners recognize it."""

_SALT_BYTES = 16
_DIGEST_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(r"(\S+)[ \t]+([0-9a-f]{32})[ \t]+([0-9a-f]{64})(?:[ \t]+([0-9.]{1,16}))?")

_log = Log("gateway.api_keys")


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKey:
    """Stored form of one API key: its name, a salt, the digest of salt and key, and a weight."""

    name: str
    salt: bytes
    digest: bytes
    weight: float = 1.0
    """Share of the key's requests among those of all keys; 2 gets twice as much as 1."""

    @classmethod
    def of(cls, name: str, secret: str, weight: float = 1.0) -> "ApiKey":
        """Make the stored form of an API key, with a new random salt.

        Args:
            name: name of the key.
            secret: the key itself; only its digest is stored.
            weight: share of the key's requests among those of all keys.
        """
        salt = secrets.token_bytes(_SALT_BYTES)
        return cls(name, salt, _digest(secret.encode(), salt), weight)

    def line(self) -> str:
        """Return the line of the key file: name, salt and digest in hex, the weight if not 1."""
        weight = "" if self.weight == 1.0 else f" {self.weight:g}"
        return f"{self.name} {self.salt.hex()} {self.digest.hex()}{weight}"


class ApiKeys:
    """The valid API keys, from the key file and LOCKSTEP_API_KEYS; a changed file is read again."""

    def __init__(self, config: GatewayConfig, variable: str, clock: Clock) -> None:
        """Read the keys.

        Args:
            config: the settings, with the path of the file.
            variable: the value of LOCKSTEP_API_KEYS, "" when it is not set.
            clock: times the checks for changes.

        Raises:
            ConfigError: when the file or the variable is not valid, or the file has no key.
        """
        self._path = key_file(config)
        self._clock = clock
        self._from_variable = parse_environment(variable)
        self.are_required = bool(self._path or self._from_variable)
        """Requests need a key."""
        self._signature: Signature = ()
        self._check_at_s = clock.now() + RELOAD_INTERVAL_S
        self._keys = self._read()
        if self.are_required and not self._keys:
            raise ConfigError(
                f"{self._path} holds no API key: create one with `lockstep api-key new NAME`."
            )

    def find(self, sent: bytes) -> ApiKey | None:
        """Return the API key that a client sent, None if it is not valid.

        Takes the same time for valid and other keys. Checks at most once per `RELOAD_INTERVAL_S`
        whether the file has changed, and then reads it again first.

        Args:
            sent: the bytes that the client sent.
        """
        self._reload_if_changed()
        found = None
        for key in self._keys:
            if hmac.compare_digest(_digest(sent, key.salt), key.digest):
                found = key
        return found

    def _reload_if_changed(self) -> None:
        """Read the file again when it has changed. A file that is not valid changes nothing."""
        now_s = self._clock.now()
        if self._path is None or now_s < self._check_at_s:
            return
        self._check_at_s = now_s + RELOAD_INTERVAL_S
        if private_files.signature(self._path) == self._signature:
            return
        try:
            self._keys = self._read()
        except ConfigError as error:
            _log.error(
                "api_keys_unreadable", cause=str(error), consequence="the previous keys stay valid"
            )
        else:
            _log.info("api_keys_read", keys=len(self._keys))

    def _read(self) -> list[ApiKey]:
        if self._path is None:
            return list(self._from_variable)
        self._signature = private_files.signature(self._path)
        keys = [*self._from_variable, *parse_file(read_file(self._path), self._path)]
        names = [key.name for key in keys]
        if len(set(names)) < len(names):
            raise ConfigError(f"{self._path} and {API_KEYS_VARIABLE} have a key name in common.")
        return keys


def key_file(config: GatewayConfig) -> Path | None:
    """Return the path of the key file, None when `gateway.api_keys_file` is empty."""
    if not config.api_keys_file:
        return None
    return user_folders.expand(config.api_keys_file, "gateway.api_keys_file")


def generate_secret() -> str:
    """Return a new random API key as the text that a client sends."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def is_valid_name(name: str) -> bool:
    """Return whether a key may have this name.

    It has 1 to 64 ASCII letters, digits, dots, underscores or hyphens and begins with a letter or a
    digit.
    """
    return _NAME.fullmatch(name) is not None


def is_valid_weight(weight: float) -> bool:
    """Return whether a key may have this weight."""
    return limits.WEIGHT_MIN <= weight <= limits.WEIGHT_MAX


def parse_file(text: str, path: Path) -> list[ApiKey]:
    """Return the entries in a key file's text, in its order.

    Args:
        text: the file's content: an entry, a comment or nothing per line.
        path: the file, for errors.

    Raises:
        ConfigError: when a line is not valid, a name occurs twice or there are too many keys. The
            message has the line's number, never its content.
    """
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or not is_valid_name(match[1]):
            raise ConfigError(
                f"{path}, line {number}, is not a name, a salt and a digest, and maybe a weight: "
                "add keys with `lockstep api-key new NAME`."
            )
        if match[1] in keys:
            raise ConfigError(f"{path}, line {number}, has the same name as an earlier line.")
        weight = _parse_weight(match[4] or "1")
        if weight is None:
            raise ConfigError(
                f"{path}, line {number}, has a weight that is not a number from "
                f"{limits.WEIGHT_MIN:g} to {limits.WEIGHT_MAX:g}."
            )
        digest = bytes.fromhex(match[3])
        keys[match[1]] = ApiKey(match[1], bytes.fromhex(match[2]), digest, weight)
    if len(keys) > KEYS_MAX:
        raise ConfigError(f"{path} holds more than {KEYS_MAX:,} keys.")
    return list(keys.values())


def parse_environment(text: str) -> list[ApiKey]:
    """Return the entries of the keys in `name=key,name=key`, the value of LOCKSTEP_API_KEYS.

    Raises:
        ConfigError: when an entry is not valid, a name occurs twice or there are too many keys. The
            message has the entry's number, never its content.
    """
    keys: dict[str, ApiKey] = {}
    for number, entry in enumerate(filter(None, text.split(",")), 1):
        name, _, secret = entry.strip().partition("=")
        entry_name = f"Entry {number} of {API_KEYS_VARIABLE}"
        if not is_valid_name(name) or not secret:
            raise ConfigError(f"{entry_name} is not name=key.")
        if len(secret) < KEY_CHARS_MIN or not secret.isascii() or not secret.isprintable():
            raise ConfigError(
                f"{entry_name} has a key that is not {KEY_CHARS_MIN} or more ASCII characters: "
                "make one with `openssl rand -hex 32`."
            )
        if name in keys:
            raise ConfigError(f"{entry_name} has the same name as an earlier entry.")
        keys[name] = ApiKey.of(name, secret)
    if len(keys) > KEYS_MAX:
        raise ConfigError(f"{API_KEYS_VARIABLE} holds more than {KEYS_MAX:,} keys.")
    return list(keys.values())


def read_file(path: Path) -> str:
    """Return the key file's text.

    Raises:
        ConfigError: when it is missing, cannot be read, or other users have access to it.
    """
    return private_files.read(
        path,
        not_allowed=0o077,
        remedy="chmod 600",
        missing=f"There is no file {path} (gateway.api_keys_file): create it with "
        "`lockstep api-key new NAME`.",
    )


def _parse_weight(text: str) -> float | None:
    """Return the weight in a text of digits and points, None if a key may not have it."""
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if is_valid_weight(weight) else None


def _digest(secret: bytes, salt: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=_DIGEST_BYTES, salt=salt).digest()
