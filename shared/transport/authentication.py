"""Who may speak on a listener with keys: which keys it admits, and as what each may speak.

CURVE alone admits every key that knows the listener's own. So a handshake is finished only for a
key that is in the list, and every frame is held against the key that its connection has proven:
a key that may be a gateway is never heard as a rank. No sockets here: `shared.transport.sockets`
asks.
"""

from collections.abc import Iterable
from pathlib import Path

from shared.clock import Clock
from shared.errors import ConfigError
from shared.identifiers import PeerId
from shared.log import Log
from shared.transport import keys
from shared.transport.keys import AllowedPeer

ALLOWED_CHECK_INTERVAL_S = 0.5
"""The list is looked at so often. A change counts when it is seen twice: editors write in steps."""

REFUSAL_LOG_INTERVAL_S = 60.0
"""A key that is refused is named in the log so often."""

REFUSALS_LOGGED_MAX = 20
"""Keys that are named in that time; strangers can draw as many keys as they like."""


class AllowList:
    """The peers in `allowed`, read again when the file changes."""

    def __init__(self, folder: Path, log: Log) -> None:
        """Read the list. Raises ConfigError as `keys.read_allowed`."""
        self._folder = folder
        self._log = log
        self._loaded = self._seen = keys.signature(folder)
        self._peers = keys.read_allowed(folder)
        self._check_at_s = 0.0

    def get(self, public_key: str) -> AllowedPeer | None:
        """Return the peer with this key, if it is allowed."""
        return self._peers.get(public_key)

    def peers(self) -> Iterable[AllowedPeer]:
        """Return all that are allowed."""
        return self._peers.values()

    def has_changed(self, now_s: float) -> bool:
        """Read the file again when it has changed; tell whether the list is another one now.

        A file that is gone or malformed is an error in the log, and the list stays what it was: a
        slip of the editor ends no session.
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
            self._peers = keys.read_allowed(self._folder)
        except ConfigError as error:
            self._log.error("allowed_keys_unreadable", cause=str(error), meanwhile="as before")
            return False
        self._log.info("allowed_keys_read", peers=len(self._peers))
        return True


class RefusalLog:
    """Names refused keys in the log, seldom enough that strangers cannot fill it."""

    def __init__(self, clock: Clock, log: Log) -> None:
        self._clock = clock
        self._log = log
        self._named_at_s: dict[str, float] = {}
        self._others = 0

    def refused(self, public_key: str, **fields: str) -> None:
        """Say that a key was refused, unless it was said within the last minute."""
        now_s = self._clock.now()
        for key, at_s in list(self._named_at_s.items()):
            if now_s - at_s >= REFUSAL_LOG_INTERVAL_S:
                del self._named_at_s[key]
        if public_key in self._named_at_s:
            return
        if len(self._named_at_s) >= REFUSALS_LOGGED_MAX:
            self._others += 1
            return
        self._named_at_s[public_key] = now_s
        if self._others:
            self._log.warning("keys_refused", others=self._others)
            self._others = 0
        self._log.warning("key_refused", public_key=public_key, **fields)


class AccessControl:
    """One listener's door: decides about keys and identities, and remembers who speaks."""

    def __init__(
        self, folder: Path, roles: Iterable[str], address: str, clock: Clock, log: Log
    ) -> None:
        """Read the list of allowed peers; only those with one of `roles` may speak here.

        Raises:
            ConfigError: the list cannot be used.
        """
        self.refused = 0
        """Handshakes and frames that were not let through."""
        self._roles = frozenset(roles)
        assert self._roles <= keys.DIALLING_ROLES.keys(), self._roles
        self._address = address
        self._clock = clock
        self._allowed = AllowList(folder, log)
        self._complaints = RefusalLog(clock, log)
        self._speakers: dict[PeerId, str] = {}
        if not any(peer.roles & self._roles for peer in self._allowed.peers()):
            log.warning(
                "nobody_is_allowed", link=address, remedy=f"`lockstep keys allow` {self._wanted()}"
            )

    def admits_key(self, public_key: str, peer_address: str) -> bool:
        """Decide whether a handshake may end well: the key is known, and has business here."""
        peer = self._allowed.get(public_key)
        if peer is not None and peer.roles & self._roles:
            return True
        self._refuse(
            public_key,
            peer_address=peer_address,
            why="not allowed here" if peer is None else f"{peer.name} has none of the roles here",
            remedy=f"lockstep keys allow '{public_key}' {peer.name if peer else 'NAME'} "
            f"{self._wanted()}",
        )
        return False

    def admits(self, peer: PeerId, public_key: str) -> bool:
        """Decide whether a connection that has proven `public_key` may speak as `peer`."""
        speaker = self._speakers.get(peer)
        if speaker == public_key:
            return True
        role = keys.role_of(peer)
        allowed = self._allowed.get(public_key)
        if speaker is not None:
            self._refuse(public_key, announces=role, why="another key speaks under this identity")
        elif allowed is None or role is None or role not in allowed.roles & self._roles:
            name = allowed.name if allowed else "nobody"
            self._refuse(public_key, announces=role, why=f"{name} may not speak as this here")
        else:
            return True
        return False

    def begin(self, peer: PeerId, public_key: str) -> None:
        """Remember that a session stands: its identity belongs to this key until it ends."""
        self._speakers[peer] = public_key

    def end(self, peer: PeerId) -> None:
        """Forget a session."""
        self._speakers.pop(peer, None)

    def revoked(self) -> list[PeerId]:
        """Return the sessions that a change of the list has taken the permission from."""
        if not self._allowed.has_changed(self._clock.now()):
            return []
        return [peer for peer, key in self._speakers.items() if not self._is_allowed(peer, key)]

    def _is_allowed(self, peer: PeerId, public_key: str) -> bool:
        allowed = self._allowed.get(public_key)
        return allowed is not None and keys.role_of(peer) in allowed.roles & self._roles

    def _refuse(self, public_key: str, *, announces: str | None = "", **fields: str) -> None:
        self.refused += 1
        if announces != "":
            fields["announces"] = announces or "no role"
        self._complaints.refused(public_key, link=self._address, **fields)

    def _wanted(self) -> str:
        return f"--role {'|'.join(sorted(self._roles))}"


def listener_key(folder: Path, own: str, role: str) -> str:
    """Return the public key that a dialler expects of the listener with this role.

    That is the one peer in `allowed` with the role; without one it is this host's own key, as the
    listener is on this host then.

    Raises:
        ConfigError: several peers have the role, or none has and this host's key has it not either.
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
