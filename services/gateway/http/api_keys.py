"""API keys: who may use this gateway. Keys are named, and only their digests are kept.

`gateway.api_keys_file` has a line per key: name, salt and digest in hexadecimal. A key of ours is
drawn with 256 bits, so that nobody can guess it however fast the hash is: one salted BLAKE2b guards
it as well as scrypt would, and a request costs about a microsecond per key. Keys that an operator
thinks of (LOCKSTEP_API_KEYS) are never written anywhere.
"""

import dataclasses
import hashlib
import hmac
import re
import secrets
from pathlib import Path

from shared.clock import Clock
from shared.configuration.loading import API_KEYS_VARIABLE
from shared.configuration.settings import GatewayConfig
from shared.errors import ConfigError
from shared.log import Log
from shared.os import private_files
from shared.os.private_files import Signature

LOOK_EVERY_S = 1.0
"""The file is looked at so often, when a request comes."""
KEYS_MAX = 1_000
"""Keys of one gateway; every request is held against all of them, in a millisecond at most."""
KEY_BYTES = 32
"""Random bytes of a key."""
KEY_CHARS_MIN = 20
"""Shortest key that the environment may bring."""
PREFIX = "lockstep-"
"""Begins every key that is made here, so that people and programs know one when they see it."""

_SALT_BYTES = 16
_DIGEST_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(r"(\S+)[ \t]+([0-9a-f]{32})[ \t]+([0-9a-f]{64})")

_log = Log("gateway.api_keys")


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of one key."""

    name: str
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, name: str, secret: str) -> "ApiKey":
        """Return what is kept of a secret."""
        salt = secrets.token_bytes(_SALT_BYTES)
        return cls(name, salt, _digest(secret.encode(), salt))

    def line(self) -> str:
        """Return it as it stands in the file."""
        return f"{self.name} {self.salt.hex()} {self.digest.hex()}"


class ApiKeys:
    """The keys that count now; the file is read again when it changes."""

    def __init__(self, config: GatewayConfig, given: str, clock: Clock) -> None:
        """Read the keys.

        Args:
            config: says where the file is.
            given: what LOCKSTEP_API_KEYS holds, "" for nothing.
            clock: says when to look at the file again.

        Raises:
            ConfigError: keys are configured, but cannot be used; or there is none.
        """
        self._path = key_file(config)
        self._clock = clock
        self._given = parse_given(given)
        self.are_required = bool(self._path or self._given)
        """Every request must bring a key."""
        self._seen: Signature = ()
        self._look_at_s = clock.now() + LOOK_EVERY_S
        self._keys = self._read()
        if self.are_required and not self._keys:
            raise ConfigError(
                f"{self._path} holds no API key: make one with `lockstep api-key new NAME`."
            )

    def name_of(self, presented: bytes) -> str | None:
        """Return the name of a key, None for what is none; takes as long for the one as the other.

        Args:
            presented: what a client sent, whatever that is.
        """
        self._look()
        found = None
        for key in self._keys:
            if hmac.compare_digest(_digest(presented, key.salt), key.digest):
                found = key.name
        return found

    def _look(self) -> None:
        """Read the file again when it has changed. One that cannot be used changes nothing."""
        now_s = self._clock.now()
        if self._path is None or now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        if private_files.signature(self._path) == self._seen:
            return
        try:
            self._keys = self._read()
        except ConfigError as error:
            _log.error("api_keys_unreadable", cause=str(error), meanwhile="the keys of before")
        else:
            _log.info("api_keys_read", keys=len(self._keys))

    def _read(self) -> list[ApiKey]:
        if self._path is None:
            return list(self._given)
        self._seen = private_files.signature(self._path)
        keys = [*self._given, *parse(read(self._path), self._path)]
        names = [key.name for key in keys]
        if len(set(names)) < len(names):
            raise ConfigError(f"{self._path} and {API_KEYS_VARIABLE} have a name in common.")
        return keys


def key_file(config: GatewayConfig) -> Path | None:
    """Return the path of the file of keys, None when there is none."""
    return Path(config.api_keys_file).expanduser() if config.api_keys_file else None


def make_secret() -> str:
    """Draw a key."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def is_name(name: str) -> bool:
    """Tell whether a key may have this name."""
    return _NAME.fullmatch(name) is not None


def parse(text: str, path: Path) -> list[ApiKey]:
    """Return the keys in a file's text.

    Raises:
        ConfigError: names file and line and what is wrong, never what stands there.
    """
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or not is_name(match[1]):
            raise ConfigError(
                f"{path}, line {number}, is not a name, a salt and a digest: make it with "
                "`lockstep api-key new NAME`."
            )
        if match[1] in keys:
            raise ConfigError(f"{path}, line {number}, has the same name as a line before.")
        keys[match[1]] = ApiKey(match[1], bytes.fromhex(match[2]), bytes.fromhex(match[3]))
    if len(keys) > KEYS_MAX:
        raise ConfigError(f"{path} holds more than {KEYS_MAX:,} keys.")
    return list(keys.values())


def parse_given(text: str) -> list[ApiKey]:
    """Return the keys in `name=key,name=key`.

    Raises:
        ConfigError: says which entry is wrong by its number, never what it holds.
    """
    keys: dict[str, ApiKey] = {}
    for number, entry in enumerate(filter(None, text.split(",")), 1):
        name, _, secret = entry.strip().partition("=")
        place = f"Entry {number} of {API_KEYS_VARIABLE}"
        if not is_name(name) or not secret:
            raise ConfigError(f"{place} is not name=key.")
        if len(secret) < KEY_CHARS_MIN or not secret.isascii() or not secret.isprintable():
            raise ConfigError(
                f"{place} has a key that is not {KEY_CHARS_MIN} or more ASCII characters: draw one "
                "with `openssl rand -hex 32`."
            )
        if name in keys:
            raise ConfigError(f"{place} has the same name as one before.")
        keys[name] = ApiKey.of(name, secret)
    if len(keys) > KEYS_MAX:
        raise ConfigError(f"{API_KEYS_VARIABLE} holds more than {KEYS_MAX:,} keys.")
    return list(keys.values())


def read(path: Path) -> str:
    """Return the file's text.

    Raises:
        ConfigError: it cannot be read, or others can reach it.
    """
    return private_files.read(
        path,
        not_allowed=0o077,
        remedy="chmod 600",
        missing=f"There is no file {path} (gateway.api_keys_file): make it with "
        "`lockstep api-key new NAME`.",
    )


def _digest(secret: bytes, salt: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=_DIGEST_BYTES, salt=salt).digest()
