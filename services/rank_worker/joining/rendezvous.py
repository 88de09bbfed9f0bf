"""The ranks meet once before MLX joins them, so that what keeps them apart has a name. No MLX.

MLX says "Couldn't connect (error: 61)" after half a minute, or waits for ever for a peer that a
firewall keeps away, and lets no thread run meanwhile. So every rank first listens where MLX will
listen, connects where MLX will connect, says its name, and closes all of it again. Who comes is not
let go before all have come: its MLX would find the meeting at the port, and be taken for a rank.
"""

import contextlib
import errno
import json
import socket
import time
from collections.abc import Mapping, Sequence

from services.rank_worker.joining import rendezvous_protocol
from services.rank_worker.joining.rendezvous_client import RendezvousClient
from services.rank_worker.joining.rendezvous_server import Expected, RendezvousServer
from shared.errors import RanksUnreachable
from shared.messages import JoinWorld
from shared.messages.rank_link import Backend

MEETING_SHARE = 0.5
"""Part of the deadline for joining that the meeting may take. Importing MLX has taken some of it,
and MLX's own init needs the rest."""

SETTLE_S = 0.05
"""Who connects first in MLX waits so long: its peer must listen first, or MLX waits a second."""

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
        rows = rendezvous_protocol.ring_rows(files)
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
        RanksUnreachable: an address is not this machine's or is taken, or a rank cannot be reached
        or has
            not come within its part of the deadline; all of them are named.
    """
    expected, dialled = links_of(order.backend, order.rank, order.environment, order.files)
    if not (expected or dialled):
        return
    _Meeting(order, expected, dialled).run()
    connects_first = order.world_size - 1 if order.backend == "ring" else order.rank
    if order.rank == connects_first and order.rank != 0:
        time.sleep(SETTLE_S)


class _Meeting:
    def __init__(self, order: JoinWorld, expected: Expected, dialled: Dialled) -> None:
        self._rank = order.rank
        self._expected = expected
        self._door = RendezvousServer(order, expected)
        self._end_s = time.monotonic() + MEETING_SHARE * order.init_deadline_s
        greeting = rendezvous_protocol.greeting(order)
        self._calls = [
            RendezvousClient(peer, address, greeting, self._end_s) for peer, address in dialled
        ]

    def run(self) -> None:
        """Listen and call at once; raise RanksUnreachable with all that is missing."""
        with contextlib.ExitStack() as stack:
            listeners = {
                address: stack.enter_context(self._listen(address)) for address in self._expected
            }
            for call in self._calls:
                call.start()
            missing = self._door.receive(listeners, self._end_s)
        for call in self._calls:
            call.wait()
        said = [self._unmet(call, cause) for call in self._calls if (cause := call.cause)]
        if said := [*said, *missing]:
            raise RanksUnreachable(" ".join(said))

    def _unmet(self, call: RendezvousClient, cause: str) -> str:
        own = f"rank {self._rank} on {socket.gethostname()}"
        if call.is_there:
            return f"Rank {call.peer} at {call.address} has not met {own}: {cause}."
        return (
            f"R{own[1:]} cannot reach rank {call.peer} at {call.address} "
            f"({cause}): does it run there, and do firewalls on the way let port "
            f"{call.address.rpartition(':')[2]} through?"
        )

    def _listen(self, address: str) -> socket.socket:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            host, _, port = address.rpartition(":")
            listener.bind((host, int(port)))
            listener.listen()
        except OSError as error:
            listener.close()
            raise RanksUnreachable(self._why_not_mine(address, error)) from None
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
