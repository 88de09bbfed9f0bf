"""The ranks meet once before MLX joins them, so that what keeps them apart has a name. No MLX.

MLX says "Couldn't connect (error: 61)" after half a minute, or waits for ever for a peer that a
firewall keeps away, and lets no thread run meanwhile. So every rank first listens where MLX will
listen, connects where MLX will connect, says its name, and closes all of it again.
"""

import contextlib
import errno
import json
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from shared.errors import RanksApart
from shared.messages import JoinWorld
from shared.messages.rank_link import Backend

MEETING_SHARE = 0.5
"""Part of the deadline for joining that the meeting may take. Importing MLX has taken some of it,
and MLX's own init needs the rest."""

SETTLE_S = 0.05
"""Who connects first in MLX waits so long: its peer must listen first, or MLX waits a second."""

_ANSWER = b"lockstep here\n"
_TRY_S = 2.0
_PAUSE_S = 0.1
_LINE_BYTES_MAX = 64

Expected = Mapping[str, Sequence[int]]
"""Own address -> ranks that come there."""
Dialled = Sequence[tuple[int, str]]
"""Ranks that this one connects to, and where."""


def links_of(
    backend: Backend, rank: int, environment: Mapping[str, str], files: Mapping[str, str]
) -> tuple[Expected, Dialled]:
    """Return where MLX will listen, and where it will connect, with this environment.

    Args:
        backend: how the world's collectives run.
        rank: this rank.
        environment: the world's variables.
        files: content of the files that variables name.
    """
    if backend == "ring" and "MLX_HOSTFILE" in files:
        rows: list[list[str]] = json.loads(files["MLX_HOSTFILE"])
        left, right = (rank - 1) % len(rows), (rank + 1) % len(rows)
        if right == rank:
            return {}, []
        return {own: [left] for own in rows[rank]}, [(right, place) for place in rows[right]]
    if backend == "jaccl" and "MLX_JACCL_COORDINATOR" in environment:
        root = environment["MLX_JACCL_COORDINATOR"]
        size = len(json.loads(files["MLX_IBV_DEVICES"]))
    elif backend == "nccl" and "NCCL_HOST_IP" in environment:
        root = f"{environment['NCCL_HOST_IP']}:{environment['NCCL_PORT']}"
        size = int(environment["MLX_WORLD_SIZE"])
    else:
        return {}, []
    return ({root: range(1, size)}, []) if rank == 0 else ({}, [(0, root)])


def meet(order: JoinWorld) -> None:
    """Wait until all ranks that MLX will connect to this one have been here.

    A world whose environment another launcher has set is left to it.

    Raises:
        RanksApart: an address is not this machine's or is taken, or a rank cannot be reached.
    """
    expected, dialled = links_of(order.backend, order.rank, order.environment, order.files)
    if not (expected or dialled):
        return
    _Meeting(order, expected, dialled, MEETING_SHARE * order.init_deadline_s).run()
    connects_first = order.world_size - 1 if order.backend == "ring" else order.rank
    if order.rank == connects_first and order.rank != 0:
        time.sleep(SETTLE_S)


class _Meeting:
    def __init__(
        self, order: JoinWorld, expected: Expected, dialled: Dialled, limit_s: float
    ) -> None:
        self._rank = order.rank
        self._epoch = order.epoch
        self._expected = expected
        self._dialled = dialled
        self._limit_s = limit_s
        self._end_s = time.monotonic() + limit_s
        self._causes: dict[tuple[int, str], str] = dict.fromkeys(dialled, "no answer")
        """Why those that are dialled have not answered yet."""

    def run(self) -> None:
        """Listen and dial at once; raise RanksApart with all that is missing."""
        with contextlib.ExitStack() as stack:
            listeners = {
                address: stack.enter_context(self._listen(address)) for address in self._expected
            }
            threads = [self._dial_in_thread(*target) for target in self._dialled]
            missing = self._receive(listeners)
            for thread in threads:
                thread.join()
        if said := [*self._unreached(), *missing]:
            raise RanksApart(" ".join(said))

    def _unreached(self) -> list[str]:
        return [
            f"Rank {self._rank} on {socket.gethostname()} cannot reach rank {peer} at {address} "
            f"({cause}): does it run there, and do firewalls on the way let port "
            f"{address.rpartition(':')[2]} through?"
            for (peer, address), cause in self._causes.items()
        ]

    def _listen(self, address: str) -> socket.socket:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.settimeout(_TRY_S)
        try:
            listener.bind(_split(address))
            listener.listen()
        except OSError as error:
            listener.close()
            raise RanksApart(self._why_not_mine(address, error)) from None
        return listener

    def _why_not_mine(self, address: str, error: OSError) -> str:
        where = f"rank {self._rank} on {socket.gethostname()}"
        if error.errno == errno.EADDRINUSE:
            return (
                f"Port {address.rpartition(':')[2]} of {address}, which is for {where}, is taken "
                "by another process: end that, or give another port in world.hostfile or "
                "world.jaccl_coordinator."
            )
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            return (
                f"{address} is for {where}, but is no address of that machine: start the rank "
                f"worker with --rank {self._rank} where it is one, or correct world.hostfile, "
                "world.data_host or world.jaccl_coordinator."
            )
        return f"Cannot listen on {address} for {where}: {error.strerror}."

    def _receive(self, listeners: Mapping[str, socket.socket]) -> list[str]:
        """Let expected ranks in until all were here; return who is missing, as sentences."""
        waited = {address: set(ranks) for address, ranks in self._expected.items()}
        with selectors.DefaultSelector() as selector:
            for address, listener in listeners.items():
                selector.register(listener, selectors.EVENT_READ, address)
            while any(waited.values()) and self._left_s() > 0.0:
                for key, _ in selector.select(min(_TRY_S, self._left_s())):
                    visitor = self._visit(listeners[key.data], waited[key.data])
                    waited[key.data].discard(visitor)
                    if not waited[key.data]:
                        # Whoever has been here may now come for MLX, and must not be let in.
                        selector.unregister(key.fileobj)
                        listeners[key.data].close()
        return [
            f"Rank {peer} has not reached rank {self._rank} on {socket.gethostname()} at {address} "
            f"within {self._limit_s:.0f} s."
            for address, ranks in waited.items()
            for peer in sorted(ranks)
        ]

    def _visit(self, listener: socket.socket, waited: set[int]) -> int:
        """Let somebody in; return the rank if it is one that is waited for, else -1."""
        try:
            with listener.accept()[0] as visitor:
                visitor.settimeout(_TRY_S)
                words = _line(visitor).split()
                if len(words) != 3 or words[:2] != [b"lockstep", str(self._epoch).encode()]:
                    return -1
                rank = int(words[2]) if words[2].isdigit() else -1
                if rank in waited:
                    visitor.sendall(_ANSWER)
                    return rank
        except OSError:
            pass
        return -1

    def _dial_in_thread(self, peer: int, address: str) -> threading.Thread:
        thread = threading.Thread(target=self._dial, args=(peer, address), daemon=True)
        thread.start()
        return thread

    def _dial(self, peer: int, address: str) -> None:
        while (left_s := self._left_s()) > 0.0:
            cause = self._try(address, min(_TRY_S, left_s))
            if cause is None:
                del self._causes[peer, address]
                return
            self._causes[peer, address] = cause
            time.sleep(_PAUSE_S)

    def _try(self, address: str, timeout_s: float) -> str | None:
        """Ask for an answer once; return why there is none, or None."""
        try:
            # MLX opens IPv4 sockets only.
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as link:
                link.settimeout(timeout_s)
                link.connect(_split(address))
                link.sendall(f"lockstep {self._epoch} {self._rank}\n".encode())
                answer = _line(link)
        except TimeoutError:
            return "no answer"
        except OSError as error:
            return error.strerror or str(error)
        return None if answer == _ANSWER else "somebody else listens there"

    def _left_s(self) -> float:
        return self._end_s - time.monotonic()


def _line(link: socket.socket) -> bytes:
    """Return what a peer says up to the end of its first line."""
    text = b""
    while not text.endswith(b"\n") and len(text) < _LINE_BYTES_MAX:
        part = link.recv(_LINE_BYTES_MAX - len(text))
        if not part:
            break
        text += part
    return text


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
