"""The calling side of a meeting: a rank connects where MLX will, until it is met. No MLX."""

import socket
import threading
import time

from services.rank_worker.joining.rendezvous_protocol import (
    HEARD,
    HERE,
    MET,
    OTHER,
    TRY_S,
    WITHOUT,
    read_line,
)

LAST_WORDS_S = 0.3
"""A door that closes in vain says who is missing; who waits there listens so much longer."""

_PAUSE_S = 0.1


class RendezvousClient:
    """One rank that this one connects to, from a thread of its own."""

    def __init__(self, peer: int, address: str, greeting: bytes, end_s: float) -> None:
        """Prepare a call to `address` that is over at `end_s`, a monotonic second."""
        self.peer = peer
        self.address = address
        self.cause = "no answer"
        """Why it has not been met; "" once it has."""
        self.is_there = False
        """It has answered as a rank of this world."""
        self._greeting = greeting
        self._end_s = end_s
        self._thread = threading.Thread(target=self._run, name=f"call-{peer}", daemon=True)

    def start(self) -> None:
        """Begin to call."""
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is met or the time is over, whatever the peer or a name server does."""
        self._thread.join(max(0.0, self._end_s - time.monotonic()) + 2 * LAST_WORDS_S)

    def _run(self) -> None:
        while self._left_s() > 0.0:
            self.cause, is_over = self._try()
            if is_over:
                return
            time.sleep(min(_PAUSE_S, max(0.0, self._left_s())))

    def _try(self) -> tuple[str, bool]:
        """Call once; return why that was in vain, "" if it was not, and whether to call no more."""
        limit_s = TRY_S
        try:
            place = self._look_up()
            limit_s = min(TRY_S, max(0.01, self._left_s()))
            # MLX opens IPv4 sockets only.
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as link:
                until_s = time.monotonic() + limit_s
                link.settimeout(limit_s)
                link.connect(place)
                link.sendall(self._greeting)
                answer = read_line(link, until_s)
                if answer == OTHER:
                    return "a rank of another epoch, world or place listens there", False
                if answer != HERE:
                    return "somebody else listens there", False
                link.sendall(HEARD)
                self.is_there = True
                return self._wait_for_all(link)
        except TimeoutError:
            # With less time than an answer may take, silence says nothing: what the call before
            # has heard still counts.
            return (self.cause if limit_s < TRY_S else self._since("no answer")), False
        except OSError as error:
            return self._since(error.strerror or str(error)), False

    def _look_up(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        # A name server that does not answer holds up this thread for longer than any deadline.
        before, self.cause = self.cause, "nobody says which address that name has"
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
        self.cause = before
        return str(found[0][4][0]), int(port)

    def _wait_for_all(self, link: socket.socket) -> tuple[str, bool]:
        try:
            answer = read_line(link, self._end_s + LAST_WORDS_S)
        except TimeoutError:
            return "it answers, but still waits for others", True
        if answer == MET:
            return "", True
        if answer.startswith(WITHOUT):
            ranks = answer.removeprefix(WITHOUT).decode(errors="replace").strip()
            return f"it answers, but rank {ranks.replace(',', ', ')} has not come to it", True
        return "it had answered, then it hung up", False

    def _since(self, cause: str) -> str:
        return f"it had answered, but now: {cause}" if self.is_there else cause

    def _left_s(self) -> float:
        return self._end_s - time.monotonic()
