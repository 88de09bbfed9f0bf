"""The connecting side of the rendezvous: tries one peer until it answers or time is up. No MLX."""

import socket
import threading
import time

from services.rank_worker.joining.rendezvous_protocol import (
    COMPLETE,
    CONFIRMATION,
    INCOMPLETE,
    REFUSED,
    REPLY_TIMEOUT_S,
    WELCOME,
    read_line,
)

FINAL_REPLY_S = 0.3
"""Time after the deadline in which a server can still report which ranks are missing."""

_RETRY_S = 0.1


class RendezvousClient(threading.Thread):
    """A thread that connects to one peer, until all ranks that the peer expects have reached it.

    It tries again and again until the deadline.
    """

    def __init__(self, peer: int, address: str, greeting: bytes, deadline_s: float) -> None:
        """Prepare to connect; `start` begins.

        Args:
            peer: rank of the peer.
            address: its address, host:port.
            greeting: the line to send first.
            deadline_s: end of all attempts, in seconds of `time.monotonic`.
        """
        super().__init__(name=f"rendezvous-{peer}", daemon=True)
        self.peer = peer
        self.address = address
        self.cause = "no answer"
        """Why the rendezvous with this peer is not complete; "" when it is."""
        self.has_answered = False
        """The peer has answered as a rank of this world."""
        self._greeting = greeting
        self._deadline_s = deadline_s

    def wait(self) -> None:
        """Wait until the rendezvous is complete or has failed, about until the deadline.

        Then `cause` is "" or says why it failed.
        """
        # A name server that does not answer may block the thread for longer.
        self.join(max(0.0, self._left_s()) + 2 * FINAL_REPLY_S)

    def run(self) -> None:
        """Connect again and again until the rendezvous is complete or the deadline has passed."""
        while self._left_s() > 0.0:
            self.cause, is_final = self._try()
            if is_final:
                return
            time.sleep(min(_RETRY_S, max(0.0, self._left_s())))

    def _try(self) -> tuple[str, bool]:
        """Connect once; return (cause of failure or "", whether to stop trying)."""
        limit_s = REPLY_TIMEOUT_S
        try:
            host_and_port = self._resolve()
            limit_s = min(REPLY_TIMEOUT_S, max(0.01, self._left_s()))
            # MLX uses IPv4 sockets only.
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as link:
                deadline_s = time.monotonic() + limit_s
                link.settimeout(limit_s)
                link.connect(host_and_port)
                link.sendall(self._greeting)
                reply = read_line(link, deadline_s)
                if reply == REFUSED:
                    return "a rank of another epoch, world or address listens there", False
                if reply != WELCOME:
                    return "another program listens there", False
                link.sendall(CONFIRMATION)
                self.has_answered = True
                return self._wait_for_all(link)
        except TimeoutError:
            # If less than the full time was left, keep the cause of the attempt before.
            is_cut_short = limit_s < REPLY_TIMEOUT_S
            return (self.cause if is_cut_short else self._with_history("no answer")), False
        except OSError as error:
            return self._with_history(error.strerror or str(error)), False

    def _resolve(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        # The cause while resolving, which may take longer than the deadline.
        previous, self.cause = self.cause, "no answer from the name server"
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
        self.cause = previous
        return str(found[0][4][0]), int(port)

    def _wait_for_all(self, link: socket.socket) -> tuple[str, bool]:
        try:
            reply = read_line(link, self._deadline_s + FINAL_REPLY_S)
        except TimeoutError:
            return "it answers, but still waits for other ranks", True
        if reply == COMPLETE:
            return "", True
        if reply.startswith(INCOMPLETE):
            ranks = reply.removeprefix(INCOMPLETE).decode(errors="replace").strip()
            return f"it answers, but rank {ranks.replace(',', ', ')} has not reached it", True
        return "it answered, then closed the connection", False

    def _with_history(self, cause: str) -> str:
        return f"it answered before, but now: {cause}" if self.has_answered else cause

    def _left_s(self) -> float:
        return self._deadline_s - time.monotonic()
