"""Authorization of peers on a listener with keys: which keys may connect, and with which role.

CURVE alone admits every key whose owner knows the listener's public key. So a handshake is
completed only for allowed keys, and every frame is checked against the key that its connection has
proven: a key with the role gateway cannot speak as a rank. Does not touch sockets;
`shared.transport.sockets` asks.
"""

from collections.abc import Iterable
from pathlib import Path

from shared.clock import Clock
from shared.errors import ConfigError
from shared.identifiers import PeerId
from shared.log import Log
from shared.transport import keys

_log = Log("link")

ALLOWED_CHECK_INTERVAL_S = 0.5
"""Seconds between checks of the list. A change counts when seen twice, since editors write in
steps."""

REFUSAL_LOG_INTERVAL_S = 60.0
"""Seconds between two log lines about the same refused key."""

REFUSALS_LOGGED_MAX = 20
"""Refused keys logged per interval. Strangers can create any number of keys."""


class AllowList:
    """The peers in the file `allowed`, read again when it changes."""

    def __init__(self, folder: Path) -> None:
        """Read the file. Raises ConfigError as `keys.read_allowed`."""
        self._folder = folder
        self._loaded = self._seen = keys.signature(folder)
        self.peers = keys.read_allowed(folder)
        """All allowed peers, by public key."""
        self._check_at_s = 0.0

    def has_changed(self, now_s: float) -> bool:
        """Read the file again if it has changed; return True if the list was replaced.

        Looks at most once per ALLOWED_CHECK_INTERVAL_S, and reads a change when two looks in a row
        find the same one. A missing or malformed file is logged as an error and the previous list
        stays in force, so that a typing error ends no session.

        Args:
            now_s: the current monotonic time, in seconds.
        """
        if now_s < self._check_at_s:
            return False
        self._check_at_s = now_s + ALLOWED_CHECK_INTERVAL_S
        before, self._seen = self._seen, keys.signature(self._folder)
        if self._seen == self._loaded or self._seen != before:
            return False
        self._loaded = self._seen
        try:
            if not self._seen:
                raise ConfigError(f"{self._folder / keys.ALLOWED_FILE} is gone.")
            self.peers = keys.read_allowed(self._folder)
        except ConfigError as error:
            _log.error(
                "allowed_keys_unreadable", cause=str(error), meanwhile="the previous list is used"
            )
            return False
        _log.info("allowed_keys_read", peers=len(self.peers))
        return True


class RefusalLog:
    """Logs refused keys, each at most once and at most REFUSALS_LOGGED_MAX per interval.

    The interval is REFUSAL_LOG_INTERVAL_S. Strangers thus cannot fill the log.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged_at_s: dict[str, float] = {}
        self._not_logged = 0

    def log_refusal(self, public_key: str, **fields: str) -> None:
        """Log a refused key, unless it was logged less than REFUSAL_LOG_INTERVAL_S ago.

        After REFUSALS_LOGGED_MAX keys in this time, further ones are only counted.

        Args:
            public_key: the key.
            fields: further fields of the log line, such as the cause.
        """
        now_s = self._clock.now()
        for key, at_s in list(self._logged_at_s.items()):
            if now_s - at_s >= REFUSAL_LOG_INTERVAL_S:
                del self._logged_at_s[key]
        if public_key in self._logged_at_s:
            return
        if len(self._logged_at_s) >= REFUSALS_LOGGED_MAX:
            self._not_logged += 1
            return
        self._logged_at_s[public_key] = now_s
        if self._not_logged:
            _log.warning("keys_refused", others=self._not_logged)
            self._not_logged = 0
        _log.warning("key_refused", public_key=public_key, **fields)


class AccessControl:
    """Decides for one listener which keys may connect, and as which peers they may speak."""

    def __init__(self, folder: Path, roles: Iterable[str], address: str, clock: Clock) -> None:
        """Read the list of allowed peers.

        Args:
            folder: folder of this host's keys, with the list.
            roles: roles of which a peer must have one to speak at this listener.
            address: the listener's address, for the log.
            clock: source of time.

        Raises:
            ConfigError: when the list cannot be used.
        """
        self.refused = 0
        """Number of refused handshakes and frames."""
        self._roles = frozenset(roles)
        assert self._roles <= keys.DIALLING_ROLES.keys(), self._roles
        self._address = address
        self._clock = clock
        self._allowed = AllowList(folder)
        self._refusal_log = RefusalLog(clock)
        self.session_keys: dict[PeerId, str] = {}
        """Peer with a session -> the key with which the session began. `admits` refuses a peer's
        frames with other keys. The listener adds and removes the entries."""
        if not any(peer.roles & self._roles for peer in self._allowed.peers.values()):
            remedy = f"`lockstep keys allow` {self._role_option()}"
            _log.warning("no_peer_allowed", link=address, remedy=remedy)

    def admits_key(self, public_key: str, peer_address: str) -> bool:
        """Decide whether a handshake succeeds; count and log a refusal.

        It succeeds if the list allows the key with a role that this listener accepts.

        Args:
            public_key: the key that the dialer has proven.
            peer_address: the dialer's network address, for the log.
        """
        peer = self._allowed.peers.get(public_key)
        if peer is not None and peer.roles & self._roles:
            return True
        why = f"{peer.name} has no role for this listener" if peer else "not allowed here"
        name = peer.name if peer else "NAME"
        remedy = f"lockstep keys allow '{public_key}' {name} {self._role_option()}"
        self._refuse(public_key, peer_address=peer_address, why=why, remedy=remedy)
        return False

    def admits(self, peer: PeerId, public_key: str) -> bool:
        """Decide whether a connection that has proven `public_key` may speak as `peer`.

        It may if the session of `peer` began with this key. Without such a session it may if this
        listener accepts the role in the identity, and the key has that role. A refusal is logged.

        Args:
            peer: routing identity under which the connection sends, such as `rank-3-1f00d5eed`.
            public_key: the key that the connection has proven.
        """
        session_key = self.session_keys.get(peer)
        if session_key == public_key:
            return True
        if session_key is not None:
            why = "another key uses this identity"
        elif self._is_allowed(peer, public_key):
            return True
        else:
            allowed = self._allowed.peers.get(public_key)
            why = f"{allowed.name if allowed else 'this key'} is not allowed this role here"
        self._refuse(public_key, why=why, announces=keys.role_of(peer) or "no role")
        return False

    def revoked(self) -> list[PeerId]:
        """Read the list again if it has changed; return the peers whose sessions must end now.

        These are the peers with a session whose key or role the changed list does not allow.
        """
        if not self._allowed.has_changed(self._clock.now()):
            return []
        return [peer for peer, key in self.session_keys.items() if not self._is_allowed(peer, key)]

    def _is_allowed(self, peer: PeerId, public_key: str) -> bool:
        allowed = self._allowed.peers.get(public_key)
        return allowed is not None and keys.role_of(peer) in allowed.roles & self._roles

    def _refuse(self, public_key: str, **fields: str) -> None:
        self.refused += 1
        self._refusal_log.log_refusal(public_key, link=self._address, **fields)

    def _role_option(self) -> str:
        return f"--role {'|'.join(sorted(self._roles))}"


def listener_key(folder: Path, own: str, role: str) -> str:
    """Return the public key that a dialer expects of the listener with this role.

    That is the only allowed peer with the role. Without one it is this host's own key, because the
    listener then runs on this host.

    Raises:
        ConfigError: when several peers have the role, or neither a peer nor this host's key has it.
    """
    assert role in keys.LISTENING_ROLES, role
    peers = keys.read_allowed(folder)
    found = [one for one in peers.values() if role in one.roles and one.public_key != own]
    if len(found) > 1:
        raise ConfigError(
            f"{folder / keys.ALLOWED_FILE} names several keys with the role {role} "
            f"({', '.join(peer.name for peer in found)}): leave one."
        )
    if found:
        return found[0].public_key
    if own in peers and role in peers[own].roles:
        return own
    raise ConfigError(
        f"No key in {folder / keys.ALLOWED_FILE} has the role {role}: run `lockstep keys show` on "
        f"its host, and here `lockstep keys allow PUBLIC_KEY NAME --role {role}`."
    )
