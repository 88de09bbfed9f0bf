"""A rendezvous of all ranks before MLX joins them, to report why one is unreachable. No MLX.

MLX reports "Couldn't connect (error: 61)" after half a minute, or waits for ever for a peer behind
a firewall, and blocks all threads meanwhile. So every rank first listens where MLX will listen,
connects where MLX will connect, identifies itself and closes everything again. No rank continues
before all have connected: its MLX would reach a rendezvous server instead of its peer's MLX.
"""

import contextlib
import errno
import json
import socket
import time
from collections.abc import Sequence

from services.rank_worker.joining import rendezvous_protocol
from services.rank_worker.joining.rendezvous_client import RendezvousClient
from services.rank_worker.joining.rendezvous_server import ExpectedRanks, RendezvousServer
from shared.errors import RanksUnreachable
from shared.messages import JoinWorld

RENDEZVOUS_SHARE = 0.5
"""Part of the deadline for joining that the rendezvous may take. Importing MLX has already taken
some of it, and MLX's own initialization needs the rest."""

SETTLE_S = 0.05
"""Delay before the rank that connects first in MLX goes on. Its peer must listen by then, or MLX
waits for a second before it tries again."""

RanksToReach = Sequence[tuple[int, str]]
"""(rank, address) of each connection that this rank opens."""


def rendezvous_links(order: JoinWorld) -> tuple[ExpectedRanks, RanksToReach]:
    """Return where MLX will listen and where it will connect, by a rank's order to join.

    Returns:
        (ranks that connect to each of this rank's addresses, connections that this rank opens);
        both are empty for a world whose environment was set by another launcher.
    """
    rank, environment = order.rank, order.environment
    if order.backend == "ring" and "MLX_HOSTFILE" in order.files:
        rows = rendezvous_protocol.ring_addresses(order.files)
        left, right = (rank - 1) % len(rows), (rank + 1) % len(rows)
        if right == rank:
            return {}, []
        return {own: [left] for own in rows[rank]}, [(right, place) for place in rows[right]]
    if order.backend == "jaccl" and "MLX_JACCL_COORDINATOR" in environment:
        root = environment["MLX_JACCL_COORDINATOR"]
        size = len(json.loads(order.files["MLX_IBV_DEVICES"]))
    elif order.backend == "nccl" and "NCCL_HOST_IP" in environment:
        root = f"{environment['NCCL_HOST_IP']}:{environment['NCCL_PORT']}"
        size = int(environment["MLX_WORLD_SIZE"])
    else:
        return {}, []
    return ({root: range(1, size)}, []) if rank == 0 else ({}, [(0, root)])


def wait_for_ranks(order: JoinWorld) -> None:
    """Wait until this rank and all ranks that MLX connects it to have reached each other.

    Does nothing for a world whose environment was set by another launcher.

    Raises:
        RanksUnreachable: when an address does not belong to this machine or is in use, or ranks
            cannot be reached or do not connect in time; names all of them.
    """
    expected, to_reach = rendezvous_links(order)
    if not (expected or to_reach):
        return
    _meet(order, expected, to_reach)
    connects_first = order.world_size - 1 if order.backend == "ring" else order.rank
    if order.rank == connects_first and order.rank != 0:
        time.sleep(SETTLE_S)


def _meet(order: JoinWorld, expected: ExpectedRanks, to_reach: RanksToReach) -> None:
    """Listen and connect at the same time; raise as `wait_for_ranks` does."""
    deadline_s = time.monotonic() + RENDEZVOUS_SHARE * order.init_deadline_s
    greeting = rendezvous_protocol.greeting(order)
    clients = [RendezvousClient(*one, greeting, deadline_s) for one in to_reach]
    with contextlib.ExitStack() as stack:
        listeners = {
            address: stack.enter_context(_listen(address, order.rank)) for address in expected
        }
        for client in clients:
            client.start()
        missing = RendezvousServer(order, expected).accept_all(listeners, deadline_s)
    for client in clients:
        client.wait()
    unreached = [
        _unreached(client, cause, order.rank) for client in clients if (cause := client.cause)
    ]
    if problems := [*unreached, *missing]:
        raise RanksUnreachable(" ".join(problems))


def _unreached(client: RendezvousClient, cause: str, rank: int) -> str:
    own = f"rank {rank} on {socket.gethostname()}"
    if client.has_answered:
        return (
            f"Rank {client.peer} at {client.address} has not completed the rendezvous with "
            f"{own}: {cause}."
        )
    return (
        f"R{own[1:]} cannot reach rank {client.peer} at {client.address} "
        f"({cause}): does it run there, and do firewalls on the way let port "
        f"{client.address.rpartition(':')[2]} through?"
    )


def _listen(address: str, rank: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        host, _, port = address.rpartition(":")
        listener.bind((host, int(port)))
        listener.listen()
    except OSError as error:
        listener.close()
        raise RanksUnreachable(_bind_error(address, rank, error)) from None
    return listener


def _bind_error(address: str, rank: int, error: OSError) -> str:
    where = f"rank {rank} on {socket.gethostname()}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {address.rpartition(':')[2]} of {address}, which is for {where}, is taken "
            "by another process: end that process, or set another port in world.hostfile or "
            "world.jaccl_coordinator."
        )
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return (
            f"{address} is for {where}, but is not an address of that machine: start the rank "
            f"worker with --rank {rank} on the right machine, or correct world.hostfile, "
            "world.data_host or world.jaccl_coordinator."
        )
    return f"Cannot listen on {address} for {where}: {error.strerror}."
