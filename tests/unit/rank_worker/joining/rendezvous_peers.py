"""Orders and calls for rendezvous of ranks on this machine."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from services.rank_worker.joining import rendezvous
from shared.errors import RanksUnreachable
from shared.messages import JoinWorld
from tests.support.orders import join_order
from tests.support.ports import free_port
from tests.support.waiting import wait_until

SHORT_S = 2.0
"""Long enough for a rendezvous of two threads on a busy machine."""
LONG_S = 30.0
EPOCH = 3

Address = tuple[str, int]


def free_ports(count: int) -> list[int]:
    """Return ports that are not in use."""
    return [free_port() for _ in range(count)]


def rendezvous_order(
    rank: int,
    size: int,
    backend: Literal["ring", "nccl", "jaccl", "off"] = "ring",
    environment: dict[str, str] | None = None,
    files: dict[str, str] | None = None,
    limit_s: float = LONG_S,
    epoch: int = EPOCH,
) -> JoinWorld:
    """Return a rank's order to join; `limit_s` is the time for the rendezvous."""
    return join_order(
        rank,
        size,
        epoch=epoch,
        backend=backend,
        environment=environment or {},
        files=files or {},
        init_deadline_s=limit_s / rendezvous.RENDEZVOUS_SHARE,
    )


def ring_orders(rows: list[list[str]], limit_s: float = LONG_S) -> list[JoinWorld]:
    """Return the orders of all ranks of a ring with these addresses."""
    files = {"MLX_HOSTFILE": json.dumps(rows)}
    size = len(rows)
    return [rendezvous_order(rank, size, files=files, limit_s=limit_s) for rank in range(size)]


def star_orders(size: int, limit_s: float = LONG_S) -> tuple[list[JoinWorld], Address]:
    """Return the orders of a jaccl world, and the address of its rendezvous."""
    (port,) = free_ports(1)
    environment = {"MLX_JACCL_COORDINATOR": f"127.0.0.1:{port}"}
    files = {"MLX_IBV_DEVICES": json.dumps([[None] * size] * size)}
    orders = [
        rendezvous_order(rank, size, "jaccl", environment, files, limit_s) for rank in range(size)
    ]
    return orders, ("127.0.0.1", port)


def run_rendezvous(one: JoinWorld) -> str:
    """Run the rendezvous of one rank; return its error message, "" on success."""
    try:
        rendezvous.wait_for_ranks(one)
    except RanksUnreachable as error:
        return str(error)
    return ""


def run_all_rendezvous(orders: list[JoinWorld]) -> list[str]:
    """Run the rendezvous of all ranks at once; return their error messages."""
    with ThreadPoolExecutor(len(orders)) as pool:
        return list(pool.map(run_rendezvous, orders))


def connect_when_listening(address: Address) -> socket.socket:
    """Connect as soon as a program listens at the address."""

    def connect() -> socket.socket | None:
        try:
            return socket.create_connection(address, 5.0)
        except ConnectionRefusedError:
            return None

    link = wait_until(connect, LONG_S, poll_s=0.01)
    assert link is not None
    return link
