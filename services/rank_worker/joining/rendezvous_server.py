"""The listening side of a meeting: whoever comes is heard without waiting for anybody. No MLX.

Ports are found by scanners, browsers and ranks of other worlds. Each visitor has a moment to say
who it is and holds up nobody else meanwhile; who says nothing of use is let out again.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Mapping, Sequence

from services.rank_worker.joining import rendezvous_protocol
from services.rank_worker.joining.rendezvous_protocol import (
    HEARD,
    HERE,
    LINE_BYTES_MAX,
    MET,
    OTHER,
    TRY_S,
)
from shared.messages import JoinWorld

VISITORS_MAX = 64
"""Visitors heard at once who have not said who they are; one more sends the oldest away."""

STRANGERS_NAMED_MAX = 3

_PAUSE_S = 0.1

Expected = Mapping[str, Sequence[int]]
"""Own address -> ranks that come there."""


class _Visitor:
    """A connection and how far its greeting has come."""

    def __init__(self, link: socket.socket, address: str, place: str) -> None:
        self.link = link
        self.address = address
        """Where it came in."""
        self.place = place
        """Where it came from."""
        self.until_s = time.monotonic() + TRY_S
        self.text = b""
        self.rank = -1
        """Who it says it is; -1: it has not yet."""


class RendezvousServer:
    """This rank's listeners, and who has come in."""

    def __init__(self, order: JoinWorld, expected: Expected) -> None:
        self._order = order
        self._expected = expected
        self._selector = selectors.DefaultSelector()
        self._waiting: list[_Visitor] = []
        """Who has not said everything, the oldest first."""
        self._here: dict[tuple[str, int], _Visitor] = {}
        """(address, rank) -> who has come; a connection that breaks is forgotten."""
        self._strangers: dict[str, str] = {}
        """Where somebody came from -> what was wrong, the first few."""

    def receive(self, listeners: Mapping[str, socket.socket], end_s: float) -> list[str]:
        """Let expected ranks in until all are here; return a sentence for each who is missing.

        Args:
            listeners: own address -> a socket that listens there; closed when it returns.
            end_s: when to stop waiting, a monotonic second.
        """
        began_s = time.monotonic()
        try:
            for address, listener in listeners.items():
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ, address)
            while self._missing() and (left_s := end_s - time.monotonic()) > 0.0:
                for key, _ in self._selector.select(min(left_s, self._until_next_s())):
                    if isinstance(key.data, str):
                        self._let_in(listeners[key.data], key.data)
                    elif key.fileobj in self._selector.get_map():
                        self._hear(key.data)
                self._send_away_late()
            # Nobody may come for MLX before this: it would be let in here.
            for listener in listeners.values():
                listener.close()
            missing = self._missing()
            ranks = sorted({rank for _, rank in missing})
            # Those too who have been greeted, and whose answer is under way.
            greeted = [one for one in self._waiting if one.rank >= 0]
            for visitor in [*self._here.values(), *greeted]:
                with contextlib.suppress(OSError):
                    visitor.link.sendall(rendezvous_protocol.without(ranks) if missing else MET)
            return [self._sentence(*one, end_s - began_s) for one in missing]
        finally:
            self._close()

    def _missing(self) -> list[tuple[str, int]]:
        return [
            (address, rank)
            for address, ranks in self._expected.items()
            for rank in ranks
            if (address, rank) not in self._here
        ]

    def _sentence(self, address: str, rank: int, waited_s: float) -> str:
        rows = rendezvous_protocol.ring_rows(self._order.files)
        home = f"from {rows[rank][0].rpartition(':')[0]} " if rows else ""
        seen = ", ".join(f"{place} {what}" for place, what in self._strangers.items())
        return (
            f"Rank {rank} has not reached rank {self._order.rank} on {socket.gethostname()} at "
            f"{address} {home}within {waited_s:.0f} s ({seen or 'nobody came'})."
        )

    def _until_next_s(self) -> float:
        """Return after how many seconds somebody's time is over."""
        if not self._waiting:
            return TRY_S
        return max(0.0, self._waiting[0].until_s - time.monotonic())

    def _let_in(self, listener: socket.socket, address: str) -> None:
        try:
            link, place = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # Out of descriptors, say. It stays readable, and must not be asked in a tight loop.
            time.sleep(_PAUSE_S)
            return
        link.setblocking(False)
        visitor = _Visitor(link, address, str(place[0]))
        if len(self._waiting) >= VISITORS_MAX:
            nameless = (one for one in self._waiting if one.rank < 0)
            self._send_away(next(nameless, self._waiting[0]), "did not say who it is")
        self._waiting.append(visitor)
        self._selector.register(link, selectors.EVENT_READ, visitor)

    def _send_away_late(self) -> None:
        while self._waiting and self._waiting[0].until_s <= time.monotonic():
            self._send_away(self._waiting[0], "did not say who it is")

    def _send_away(self, visitor: _Visitor, what: str) -> None:
        self._selector.unregister(visitor.link)
        visitor.link.close()
        if visitor in self._waiting:
            self._waiting.remove(visitor)
        if self._here.get((visitor.address, visitor.rank)) is visitor:
            del self._here[visitor.address, visitor.rank]
        if visitor.place in self._strangers or len(self._strangers) < STRANGERS_NAMED_MAX:
            self._strangers[visitor.place] = what

    def _hear(self, visitor: _Visitor) -> None:
        """Take what a visitor says; answer, or send it away."""
        try:
            part = visitor.link.recv(LINE_BYTES_MAX)
            visitor.text += part
            if not part:
                self._send_away(visitor, "came and hung up")
            elif visitor not in self._waiting:
                self._send_away(visitor, "said more than a rank says")
            elif b"\n" in visitor.text or len(visitor.text) >= LINE_BYTES_MAX:
                self._answer(visitor)
        except BlockingIOError:
            return
        except OSError:
            self._send_away(visitor, "came and hung up")

    def _answer(self, visitor: _Visitor) -> None:
        if visitor.rank >= 0:
            if visitor.text != HEARD:
                self._send_away(visitor, "said more than a rank says")
                return
            self._waiting.remove(visitor)
            before = self._here.get((visitor.address, visitor.rank))
            if before is not None:
                self._send_away(before, "came again")
            self._here[visitor.address, visitor.rank] = visitor
            return
        found = rendezvous_protocol.greeted(visitor.text, self._order)
        if found == "stranger":
            self._send_away(visitor, "did not say who it is")
        elif found == "other":
            visitor.link.sendall(OTHER)
            self._send_away(visitor, "is a rank of another epoch or world")
        elif found not in self._expected[visitor.address]:
            visitor.link.sendall(OTHER)
            self._send_away(visitor, f"is rank {found}, whose place is elsewhere")
        else:
            visitor.rank, visitor.text = found, b""
            visitor.link.sendall(HERE)

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Visitor):
                key.data.link.close()
        self._selector.close()
