"""Sockets of links, with or without keys. The only module that uses ZeroMQ.

Every socket has a ZeroMQ context of its own, because only the end of a context waits until sent
frames have left; a process that exits at once would otherwise lose its goodbye. A context also has
one place where handshakes ask for permission (ZAP, ZeroMQ's RFC 27). Here that is a socket which
the listener's own `receive` answers, so no thread or lock is needed and no listener decides for
another.
"""

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from shared import limits
from shared.errors import ConfigError
from shared.transport import keys
from shared.transport.addresses import check_address, is_tcp
from shared.transport.authentication import AccessControl
from shared.transport.keys import Keys

HANDSHAKES_MAX = 64
"""Handshakes answered in one `receive`, so that strangers cannot delay sessions."""

LINGER_S = 0.2
"""Seconds that `close` waits for sent frames to leave."""

_NO_WAIT = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _INPUT = int(zmq.EVENTS), int(zmq.POLLIN)
# Integers, since pyzmq's enumerations cost a microsecond per use.
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "this host's key is not allowed there",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "one side uses keys and the other does not",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the listener has another key than the one known here",
}
"""Why a dialer's handshake failed. The last cause is inferred: the listener just hangs up."""

_monitor_numbers = itertools.count()

_open_contexts: set[zmq.Context[Any]] = set()
"""Contexts that have not ended. A context that is garbage-collected in a cycle with its socket
would wait for that socket forever, inside the collection."""


def load_keys(folder: Path) -> Keys | None:
    """Return this host's keys, None if it has none.

    Raises:
        ConfigError: when public and secret key do not match, or other users can access them.
    """
    secret = keys.read_secret(folder)
    if secret is None:
        return None
    public = zmq.curve_public(secret.encode()).decode()
    if keys.read_public(folder) not in (None, public):
        raise ConfigError(
            f"{folder / keys.PUBLIC_FILE} does not belong to {folder / keys.SECRET_FILE}: "
            "remove it, or make a new pair with `lockstep keys new --force`."
        )
    return Keys(folder, public, secret)


def keys_for(address: str, keys_dir: Path | None, *, is_dialled: bool) -> Keys | None:
    """Return this host's keys for a link over tcp; None over ipc, and on loopback without keys.

    Args:
        address: ipc://path or tcp://host:port.
        keys_dir: folder of the keys; None: keys are not used.
        is_dialled: the link connects to the address; False: it listens there. Errors say which.

    Raises:
        ConfigError: when the address is not on loopback and there are no keys, or the keys cannot
            be used.
    """
    own = load_keys(keys_dir) if keys_dir is not None and is_tcp(address) else None
    check_address(address, has_keys=own is not None, is_dialled=is_dialled)
    return own


def new_key_pair() -> tuple[str, str]:
    """Create a key pair; return (public, secret)."""
    while True:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        # A key that starts with "-" would be parsed as an option on a command line.
        if public[0].isalnum():
            return public, secret


def listen(
    address: str, own: Keys | None = None, access: AccessControl | None = None
) -> "LinkSocket":
    """Bind a ROUTER socket. With keys, only peers that `access` admits can connect.

    Raises:
        ConfigError: when the address cannot be bound.
    """
    assert (own is None) == (access is None)
    link = LinkSocket(zmq.ROUTER, address, access)
    if own is not None:
        link.use_keys_as_listener(own)
    try:
        link.bind(address)
    except zmq.ZMQError as error:
        link.close()
        raise ConfigError(
            f"Cannot listen on {address}: {error}. Another Lockstep may be running there."
        ) from None
    return link


def dial(
    address: str, identity: bytes, own: Keys | None = None, listener_key: str = ""
) -> "LinkSocket":
    """Connect a DEALER socket. With keys, only the owner of `listener_key` is accepted as the peer.

    Raises:
        ConfigError: when ZeroMQ does not accept the address.
    """
    link = LinkSocket(zmq.DEALER, address, None)
    link.identify(identity)
    if own is not None:
        link.use_keys_as_dialer(own, listener_key)
    try:
        link.connect()
    except zmq.ZMQError as error:
        link.close()
        raise ConfigError(f"Cannot connect to {address}: {error}.") from None
    return link


class LinkSocket:
    """The ZeroMQ socket of one end of a link, which `wake` can interrupt while it waits."""

    def __init__(self, kind: int, address: str, access: AccessControl | None) -> None:
        """Open a ROUTER or DEALER socket (`kind`). With `access` only admitted peers connect."""
        self.address = address
        """The requested address; once bound, the actual one."""
        self.is_drained = False
        """True if the last `receive` found no more frames, so that `fileno` will signal the next
        arrival. Sends reset it, because they may consume the signal."""
        self._access = access
        self._context = zmq.Context()
        _open_contexts.add(self._context)
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        _set_options(self._socket, kind, address)
        self._zap: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        if access is not None:
            self._zap = self._context.socket(zmq.REP)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(_ZAP_ENDPOINT)
        self._poller = zmq.Poller()
        for source in self.sources():
            self._poller.register(source, zmq.POLLIN)

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._socket.closed

    def identify(self, identity: bytes) -> None:
        """Set the identity by which the listener routes frames here. Call it before `connect`."""
        self._socket.setsockopt(zmq.IDENTITY, identity)

    def use_keys_as_listener(self, own: Keys) -> None:
        """Prove this host's key; admit only keys that `access` allows. Call it before `bind`."""
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        self._socket.setsockopt(zmq.ZAP_DOMAIN, b"lockstep")
        # Without this option a listener without its ZAP socket would admit every key.
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def use_keys_as_dialer(self, own: Keys, listener_key: str) -> None:
        """Prove this host's key and require the listener's. Call it before `connect`."""
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, listener_key.encode())
        # A handshake costs the listener about 1 ms; a retry every 20 ms would be 50 per second.
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)

    def bind(self, address: str) -> None:
        """Bind the socket. Raises ZMQError."""
        self._socket.bind(address)
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self.address = bound.decode().rstrip("\0")

    def connect(self) -> None:
        """Connect the socket, and over tcp monitor failed handshakes. Raises ZMQError."""
        if is_tcp(self.address):
            # No high-water mark, because ZeroMQ's I/O thread blocks on a full monitor queue.
            endpoint = f"inproc://handshakes-{os.getpid()}-{next(_monitor_numbers)}"
            self._socket.monitor(endpoint, sum(_FAILURES))
            self._monitor = self._context.socket(zmq.PAIR)
            self._monitor.setsockopt(zmq.LINGER, 0)
            self._monitor.setsockopt(zmq.RCVHWM, 0)
            self._monitor.connect(endpoint)
        self._socket.connect(self.address)

    def reconnect(self, identity: bytes) -> None:
        """Connect again under a routing identity that no earlier connection has used.

        Does nothing over ipc, where connections do not break silently and no handshake is refused.
        """
        if self._monitor is None:
            return
        self.is_drained = False
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(self.address)
        self.identify(identity)
        self._socket.connect(self.address)

    def handshake_failures(self) -> list[tuple[str, bool]]:
        """Return failed handshakes since the last call: (cause, whether ZeroMQ stops trying)."""
        failures: list[tuple[str, bool]] = []
        while self._monitor is not None:
            try:
                facts = self._monitor.recv_multipart(zmq.NOBLOCK)[0]
            except zmq.Again:
                break
            event = int.from_bytes(facts[:2], sys.byteorder)
            failures.append((_FAILURES[event], event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL))
        return failures

    def wake(self) -> None:
        """Make a waiting `wait` return. The only method that other threads may call."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"w")

    def fileno(self) -> int:
        """Return a descriptor, readable when frames may have arrived (edge-triggered)."""
        descriptor: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        return descriptor

    def sources(self) -> list[Any]:
        """Return the sockets and descriptors that `zmq.Poller` must watch for input."""
        return [self._socket, self._wake_read, *([self._zap] if self._zap else [])]

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for a frame or for `wake`."""
        if timeout_s <= 0.0:
            return
        self.is_drained = False
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1_000 + 0.999))))
        if self._wake_read in ready:
            self.clear_wake()

    def clear_wake(self) -> None:
        """Forget calls of `wake` so far, so that the next `wait` waits again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4_096)

    def receive(self, count_max: int) -> Iterator[tuple[list[bytes], str]]:
        """Answer handshakes; yield up to `count_max` frames as (parts, proven key or "").

        It ends earlier after the frame with which `limits.RECEIVED_BYTES_MAX` are reached.
        """
        if self._access is not None:
            self._answer_handshakes(self._access)
        self.is_drained = False
        left_bytes = limits.RECEIVED_BYTES_MAX
        while count_max > 0 and left_bytes > 0:
            # The question takes a third of the time of an exception for an empty socket.
            events: int = self._socket.getsockopt(_EVENTS)  # type: ignore[assignment]
            if not events & _INPUT:
                self.is_drained = True
                return
            # Faster than `recv_multipart`, which queries the socket after every part.
            frame = self._socket.recv(_NO_WAIT, copy=False)
            key = _proven_key(frame) if self._access is not None else ""
            parts = [frame.bytes]
            while frame.more:
                frame = self._socket.recv(_NO_WAIT, copy=False)
                parts.append(frame.bytes)
            count_max -= 1
            left_bytes -= sum(map(len, parts))
            yield parts, key

    def send(self, parts: list[bytes]) -> bool:
        """Send without waiting; return False on a listener without a connection to the peer.

        The session resends frames that are not acknowledged.
        """
        self.is_drained = False
        try:
            for part in parts[:-1]:
                self._socket.send(part, _MORE)
            self._socket.send(parts[-1], _NO_WAIT)
        except zmq.ZMQError as error:
            return error.errno != zmq.EHOSTUNREACH
        return True

    def close(self) -> None:
        """Close all sockets once sent frames have left, after `LINGER_S` at most. May be repeated.

        If something else delays ZeroMQ, such as a name resolution, half as long again is waited at
        most; the context then ends in the background.
        """
        if self._socket.closed:
            # Closing a descriptor number twice could close another file with the same number.
            return
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=int(LINGER_S * 1_000))
        if self._zap is not None:
            self._zap.close(linger=0)
        ending = threading.Thread(target=_end_context, args=(self._context,), daemon=True)
        ending.start()
        ending.join(1.5 * LINGER_S)
        # Another thread may still call `wake`, and the number may soon belong to another file.
        write, self._wake_write = self._wake_write, -1
        os.close(write)
        os.close(self._wake_read)

    def _answer_handshakes(self, access: AccessControl) -> None:
        assert self._zap is not None
        for _ in range(HANDSHAKES_MAX):
            try:
                question = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # ZAP request: version, request id, domain, address, identity, mechanism, key
            request_id = question[1] if len(question) > 1 else b""
            key = ""
            if len(question) == 7 and question[5] == b"CURVE" and len(question[6]) == 32:
                key = z85.encode(question[6]).decode()
            if key and access.admits_key(key, question[3].decode(errors="replace")):
                answer = [b"200", b"", key.encode()]
            else:
                answer = [b"400", b"not allowed", b""]
            self._zap.send_multipart([_ZAP_VERSION, request_id, *answer, b""])


class SocketPoller:
    """Waits for frames and wakes of several sockets, all of one thread."""

    def __init__(self, sockets: list[LinkSocket]) -> None:
        self._poller = zmq.Poller()
        self._sockets: dict[Any, LinkSocket] = {}
        for socket in sockets:
            for source in socket.sources():
                self._poller.register(source, zmq.POLLIN)
                self._sockets[source] = socket

    def wait(self, timeout_s: float) -> list[LinkSocket]:
        """Wait up to `timeout_s` seconds; return the sockets that have frames or were woken."""
        found: list[LinkSocket] = []
        for source, _ in self._poller.poll(max(0, int(timeout_s * 1_000 + 0.999))):
            socket = self._sockets[source]
            if isinstance(source, int):
                socket.clear_wake()
            socket.is_drained = False
            if socket not in found:
                found.append(socket)
        return found


def _end_context(context: zmq.Context[Any]) -> None:
    context.term()
    _open_contexts.discard(context)


def _proven_key(frame: zmq.Frame) -> str:
    # ZeroMQ sets it from the ZAP answer; the peer's own metadata cannot override it.
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _set_options(socket: zmq.Socket[bytes], kind: int, address: str) -> None:
    """Set every option explicitly: ZeroMQ's defaults drop frames, block or grow without bound."""
    socket.set_hwm(limits.SOCKET_MESSAGES_MAX)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(limits.PEER_SILENCE_MAX_S * 1_000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
