"""The only file that touches ZeroMQ: one factory for the sockets of links, with keys or without.

Every socket has a ZeroMQ context of its own: only the end of a context waits until what was sent
has left, and a process that ends at once would take its goodbye with it. A context also has exactly
one place where handshakes ask for permission (ZAP, ZeroMQ's RFC 27). That place is a socket which
the listener's own `receive` answers, so there is no thread, no lock, and no listener that decides
for another.
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
"""Handshakes answered in one `receive`: strangers must not hold up sessions."""

LINGER_S = 0.2
"""How long `close` gives what was sent to leave."""

_NO_WAIT = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
# As integers: pyzmq's enumerations cost a microsecond at each use.
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "this host's key is not allowed there",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "one side uses keys and the other does not",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the listener has another key than the one known here",
}
"""What a dialler can learn of a handshake that failed. The last is a guess: it just hangs up."""

_monitor_numbers = itertools.count()

_open_contexts: set[zmq.Context[Any]] = set()
"""Held until they have ended: one that is forgotten with its socket, in a cycle, would wait for
that socket in the middle of a garbage collection, for ever."""


def load_keys(folder: Path) -> Keys | None:
    """Return this host's keys, or None if it has none.

    Raises:
        ConfigError: they cannot be used, or others could have read them.
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
    """Return this host's keys if a link at this address uses them.

    Raises:
        ConfigError: the address needs keys and there are none, or they cannot be used.
    """
    own = load_keys(keys_dir) if keys_dir is not None and is_tcp(address) else None
    check_address(address, has_keys=own is not None, is_dialled=is_dialled)
    return own


def new_key_pair() -> tuple[str, str]:
    """Draw a key pair; return (public, secret)."""
    while True:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        # A key that begins with "-" is an option on a command line.
        if public[0].isalnum():
            return public, secret


def listen(
    address: str, own: Keys | None = None, gate: AccessControl | None = None
) -> "LinkSocket":
    """Bind a ROUTER; with keys, only peers that `gate` admits get through.

    Raises:
        ConfigError: the address cannot be had.
    """
    assert (own is None) == (gate is None)
    link = LinkSocket(zmq.ROUTER, address, gate)
    if own is not None:
        link.serve_with(own)
    try:
        link.bind(address)
    except zmq.ZMQError as error:
        link.close()
        raise ConfigError(
            f"Cannot listen on {address}: {error}. Is another Lockstep running there?"
        ) from None
    return link


def dial(
    address: str, identity: bytes, own: Keys | None = None, listener_key: str = ""
) -> "LinkSocket":
    """Connect a DEALER; with keys, only to the holder of the secret of `listener_key`.

    Raises:
        ConfigError: the address is none that ZeroMQ understands.
    """
    link = LinkSocket(zmq.DEALER, address, None)
    link.identify(identity)
    if own is not None:
        link.dial_with(own, listener_key)
    try:
        link.connect()
    except zmq.ZMQError as error:
        link.close()
        raise ConfigError(f"Cannot connect to {address}: {error}.") from None
    return link


class LinkSocket:
    """A socket with its waker and, if it listens with keys, the place that handshakes ask."""

    def __init__(self, kind: int, address: str, gate: AccessControl | None) -> None:
        self.address = address
        """As it was asked for; as it is, once bound."""
        self.is_drained = False
        """Nothing is left to receive, and `fileno` will tell of what comes: the last call that
        touched the queue has found it empty. A send may take note of news without a word."""
        self._gate = gate
        self._context = zmq.Context()
        _open_contexts.add(self._context)
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        _set_options(self._socket, kind, address)
        self._zap: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        if gate is not None:
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
        """Set the routing identity; before `connect`."""
        self._socket.setsockopt(zmq.IDENTITY, identity)

    def serve_with(self, own: Keys) -> None:
        """Admit only connections that prove a key which the gate admits; before `bind`."""
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        self._socket.setsockopt(zmq.ZAP_DOMAIN, b"lockstep")
        # Without it a listener whose ZAP socket is gone would let everybody in.
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def dial_with(self, own: Keys, listener_key: str) -> None:
        """Prove this host's key, and ask for the listener's; before `connect`."""
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, listener_key.encode())
        # A handshake costs a listener about a millisecond; 20 ms would be 50 of them a second.
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)

    def bind(self, address: str) -> None:
        """Listen. Raises ZMQError."""
        self._socket.bind(address)
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self.address = bound.decode().rstrip("\0")

    def connect(self) -> None:
        """Connect, and over tcp watch for handshakes that fail. Raises ZMQError."""
        if is_tcp(self.address):
            # ZeroMQ blocks the I/O thread when a monitor's queue is full: no high-water mark.
            endpoint = f"inproc://handshakes-{os.getpid()}-{next(_monitor_numbers)}"
            self._socket.monitor(endpoint, sum(_FAILURES))
            self._monitor = self._context.socket(zmq.PAIR)
            self._monitor.setsockopt(zmq.LINGER, 0)
            self._monitor.setsockopt(zmq.RCVHWM, 0)
            self._monitor.connect(endpoint)
        self._socket.connect(self.address)

    def redial(self, identity: bytes) -> None:
        """Connect anew, under another identity that no dying connection still holds.

        Over ipc it does nothing: there no connection dies halfway, and no handshake is refused.
        """
        if self._monitor is None:
            return
        self.is_drained = False
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(self.address)
        self.identify(identity)
        self._socket.connect(self.address)

    def handshake_failures(self) -> list[tuple[str, bool]]:
        """Return what failed since the last call: the cause, and whether ZeroMQ gave up on it."""
        failures: list[tuple[str, bool]] = []
        while self._monitor is not None:
            try:
                facts = self._monitor.recv_multipart(zmq.NOBLOCK)[0]
            except zmq.Again:
                break
            event = int.from_bytes(facts[:2], sys.byteorder)
            gave_up = event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            failures.append((_FAILURES[event], gave_up))
        return failures

    def wake(self) -> None:
        """Make a `wait` return. The only call that other threads may make."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"w")

    def fileno(self) -> int:
        """Return a descriptor, readable when there may be news (edge-triggered)."""
        descriptor: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        return descriptor

    def sources(self) -> list[Any]:
        """Return what a poller must watch."""
        return [self._socket, self._wake_read, *([self._zap] if self._zap else [])]

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for something to receive, or for `wake`."""
        if timeout_s <= 0.0:
            return
        self.is_drained = False
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1_000 + 0.999))))
        if self._wake_read in ready:
            self.forget_wake()

    def forget_wake(self) -> None:
        """Let the next `wait` wait again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4_096)

    def receive(self, count_max: int) -> Iterator[tuple[list[bytes], str]]:
        """Answer handshakes; return what arrived: parts, and the key that the sender has proven.

        The key is "" without a gate.
        """
        if self._gate is not None:
            self._answer_handshakes(self._gate)
        self.is_drained = False
        for _ in range(count_max):
            try:
                # Frames know whether more follows; `recv_multipart` asks the socket each time.
                frame = self._socket.recv(_NO_WAIT, copy=False)
            except zmq.Again:
                self.is_drained = True
                return
            key = _proven_key(frame) if self._gate is not None else ""
            parts = [frame.bytes]
            while frame.more:
                frame = self._socket.recv(_NO_WAIT, copy=False)
                parts.append(frame.bytes)
            yield parts, key

    def send(self, parts: list[bytes]) -> bool:
        """Send if it can be done now; a session sends again what is not acknowledged.

        Returns:
            False on a listener that has no connection to the peer at the moment.
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
        """Close everything once what was sent has left; after `LINGER_S` the rest is given up.

        Twice is harmless. Whatever else holds up ZeroMQ, such as a name that is being resolved, is
        waited for half as long again at most, and ends in the background.
        """
        if self._socket.closed:
            # Closing a descriptor twice would close somebody else's.
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
        # Another thread may still want to wake this one: that number will be somebody else's file.
        write, self._wake_write = self._wake_write, -1
        os.close(write)
        os.close(self._wake_read)

    def _answer_handshakes(self, gate: AccessControl) -> None:
        assert self._zap is not None
        for _ in range(HANDSHAKES_MAX):
            try:
                question = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # version, request id, domain, address, identity (the listener's), mechanism, key
            request_id = question[1] if len(question) > 1 else b""
            key = ""
            if len(question) == 7 and question[5] == b"CURVE" and len(question[6]) == 32:
                key = z85.encode(question[6]).decode()
            if key and gate.admits_key(key, question[3].decode(errors="replace")):
                answer = [b"200", b"", key.encode()]
            else:
                answer = [b"400", b"not allowed", b""]
            self._zap.send_multipart([_ZAP_VERSION, request_id, *answer, b""])


class SocketPoller:
    """Waits for several sockets of one thread at once."""

    def __init__(self, sockets: list[LinkSocket]) -> None:
        self._poller = zmq.Poller()
        self._sockets: dict[Any, LinkSocket] = {}
        for socket in sockets:
            for source in socket.sources():
                self._poller.register(source, zmq.POLLIN)
                self._sockets[source] = socket

    def wait(self, timeout_s: float) -> list[LinkSocket]:
        """Wait up to `timeout_s`; return the sockets that have news."""
        found: list[LinkSocket] = []
        for source, _ in self._poller.poll(max(0, int(timeout_s * 1_000 + 0.999))):
            socket = self._sockets[source]
            if isinstance(source, int):
                socket.forget_wake()
            socket.is_drained = False
            if socket not in found:
                found.append(socket)
        return found


def _end_context(context: zmq.Context[Any]) -> None:
    context.term()
    _open_contexts.discard(context)


def _proven_key(frame: zmq.Frame) -> str:
    # Set from the answer to the handshake; what a peer says about itself cannot replace it.
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _set_options(socket: zmq.Socket[bytes], kind: int, address: str) -> None:
    """Set every option on purpose: the defaults drop, hang or grow."""
    socket.setsockopt(zmq.SNDHWM, limits.SOCKET_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, limits.SOCKET_MESSAGES_MAX)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(limits.PEER_SILENCE_S * 1_000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
