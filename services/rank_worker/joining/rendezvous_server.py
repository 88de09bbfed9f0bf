"""The listening side of the rendezvous: serves all connections at once. No MLX.

Port scanners, browsers and ranks of other worlds may connect too. Each connection has a short time
to send a valid greeting and is closed otherwise, without delaying the others.
"""

import contextlib
import dataclasses
import selectors
import socket
import time
from collections.abc import Mapping, Sequence

from services.rank_worker.joining import rendezvous_protocol
from services.rank_worker.joining.rendezvous_protocol import (
    COMPLETE,
    CONFIRMATION,
    LINE_BYTES_MAX,
    REFUSED,
    REPLY_TIMEOUT_S,
    WELCOME,
)
from shared.messages import JoinWorld

PENDING_PEERS_MAX = 64
"""Limit for connections without a complete greeting; one more closes the oldest."""

REFUSED_HOSTS_MAX = 3
"""Limit for the hosts that the error sentence lists."""

_ACCEPT_RETRY_S = 0.1

ExpectedRanks = Mapping[str, Sequence[int]]
"""Own address -> ranks that connect there."""


@dataclasses.dataclass(slots=True, eq=False)
class _Peer:
    """A connection, and how much of its greeting has arrived."""

    link: socket.socket
    address: str
    """Own address that it has connected to."""
    host: str
    """Address that it has connected from."""
    deadline_s: float
    text: bytes = b""
    rank: int = -1
    """The rank in its greeting; -1: none yet."""


class RendezvousServer:
    """Waits on this rank's addresses until the expected ranks have connected and greeted."""

    def __init__(self, order: JoinWorld, expected: ExpectedRanks) -> None:
        self._order = order
        self._expected = expected
        self._selector = selectors.DefaultSelector()
        self._pending: list[_Peer] = []
        """Connections without a complete greeting, oldest first."""
        self._connected: dict[tuple[str, int], _Peer] = {}
        """(address, rank) -> connection, while it lasts."""
        self._refused: dict[str, str] = {}
        """Host -> why its connection was closed; the first few."""

    def accept_all(self, listeners: Mapping[str, socket.socket], deadline_s: float) -> list[str]:
        """Accept connections until all expected ranks are connected or the deadline passes.

        Args:
            listeners: own address -> a listening socket; all are closed before the method returns.
            deadline_s: in seconds of `time.monotonic`.

        Returns:
            One error sentence per missing rank; empty when all have connected.
        """
        started_s = time.monotonic()
        try:
            for address, listener in listeners.items():
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ, address)
            while self._missing() and (left_s := deadline_s - time.monotonic()) > 0.0:
                for key, _ in self._selector.select(min(left_s, self._next_timeout_s())):
                    if isinstance(key.data, str):
                        self._accept(listeners[key.data], key.data)
                    elif key.fileobj in self._selector.get_map():
                        self._receive(key.data)
                self._close_late()
            # Close first: a rank's MLX that connects before would reach this server.
            for listener in listeners.values():
                listener.close()
            missing = self._missing()
            ranks = sorted({rank for _, rank in missing})
            # Ranks whose confirmation has not arrived yet also get the final line.
            welcomed = [peer for peer in self._pending if peer.rank >= 0]
            for peer in [*self._connected.values(), *welcomed]:
                with contextlib.suppress(OSError):
                    line = rendezvous_protocol.incomplete(ranks) if missing else COMPLETE
                    peer.link.sendall(line)
            return [self._sentence(*one, deadline_s - started_s) for one in missing]
        finally:
            self._close_all()

    def _missing(self) -> list[tuple[str, int]]:
        return [
            (address, rank)
            for address, ranks in self._expected.items()
            for rank in ranks
            if (address, rank) not in self._connected
        ]

    def _sentence(self, address: str, rank: int, waited_s: float) -> str:
        rows = rendezvous_protocol.ring_addresses(self._order.files)
        origin = f"from {rows[rank][0].rpartition(':')[0]} " if rows else ""
        refused = ", ".join(f"{host} {cause}" for host, cause in self._refused.items())
        return (
            f"Rank {rank} has not reached rank {self._order.rank} on {socket.gethostname()} at "
            f"{address} {origin}within {waited_s:.0f} s ({refused or 'no connection'})."
        )

    def _next_timeout_s(self) -> float:
        """Return the seconds until the oldest pending connection times out."""
        if not self._pending:
            return REPLY_TIMEOUT_S
        return max(0.0, self._pending[0].deadline_s - time.monotonic())

    def _accept(self, listener: socket.socket, address: str) -> None:
        try:
            link, remote = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # For example out of descriptors. The socket stays readable, so avoid a busy loop.
            time.sleep(_ACCEPT_RETRY_S)
            return
        link.setblocking(False)
        peer = _Peer(link, address, str(remote[0]), time.monotonic() + REPLY_TIMEOUT_S)
        if len(self._pending) >= PENDING_PEERS_MAX:
            without_rank = (one for one in self._pending if one.rank < 0)
            self._close(next(without_rank, self._pending[0]), "sent no valid greeting")
        self._pending.append(peer)
        self._selector.register(link, selectors.EVENT_READ, peer)

    def _close_late(self) -> None:
        while self._pending and self._pending[0].deadline_s <= time.monotonic():
            self._close(self._pending[0], "sent no valid greeting")

    def _close(self, peer: _Peer, cause: str) -> None:
        self._selector.unregister(peer.link)
        peer.link.close()
        if peer in self._pending:
            self._pending.remove(peer)
        if self._connected.get((peer.address, peer.rank)) is peer:
            del self._connected[peer.address, peer.rank]
        if peer.host in self._refused or len(self._refused) < REFUSED_HOSTS_MAX:
            self._refused[peer.host] = cause

    def _receive(self, peer: _Peer) -> None:
        """Read from a peer; reply, or close the connection."""
        try:
            part = peer.link.recv(LINE_BYTES_MAX)
            peer.text += part
            if not part:
                self._close(peer, "closed its connection")
            elif peer not in self._pending:
                self._close(peer, "sent unexpected data")
            elif b"\n" in peer.text or len(peer.text) >= LINE_BYTES_MAX:
                self._reply(peer)
        except BlockingIOError:
            return
        except OSError:
            self._close(peer, "closed its connection")

    def _reply(self, peer: _Peer) -> None:
        if peer.rank >= 0:
            if peer.text != CONFIRMATION:
                self._close(peer, "sent unexpected data")
                return
            self._pending.remove(peer)
            previous = self._connected.get((peer.address, peer.rank))
            if previous is not None:
                self._close(previous, "connected again")
            self._connected[peer.address, peer.rank] = peer
            return
        rank = rendezvous_protocol.parse_greeting(peer.text, self._order)
        if rank == "invalid":
            self._close(peer, "sent no valid greeting")
        elif rank == "other":
            peer.link.sendall(REFUSED)
            self._close(peer, "is a rank of another epoch or world")
        elif rank not in self._expected[peer.address]:
            peer.link.sendall(REFUSED)
            self._close(peer, f"is rank {rank}, which belongs to another address")
        else:
            peer.rank, peer.text = rank, b""
            peer.link.sendall(WELCOME)

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Peer):
                key.data.link.close()
        self._selector.close()
