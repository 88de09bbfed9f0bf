"""Orders of worlds that meet on this machine, for tests."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from services.rank_worker.joining import rendezvous
from shared.errors import RanksUnreachable
from shared.messages import JoinWorld
from tests.orders import join_order
from tests.ports import free_port

SHORT_S = 2.0
"""Long enough for two threads of a busy machine to meet in."""
LONG_S = 30.0
EPOCH = 3

Address = tuple[str, int]


def free_ports(count: int) -> list[int]:
    """Return ports that nobody has."""
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
    """Return one rank's order to join; `limit_s` is the meeting's part of the deadline."""
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
    """Return the orders of a ring with these addresses."""
    files = {"MLX_HOSTFILE": json.dumps(rows)}
    size = len(rows)
    return [rendezvous_order(rank, size, files=files, limit_s=limit_s) for rank in range(size)]


def star_orders(size: int, limit_s: float = LONG_S) -> tuple[list[JoinWorld], Address]:
    """Return the orders of a jaccl world, and where its ranks meet."""
    (port,) = free_ports(1)
    environment = {"MLX_JACCL_COORDINATOR": f"127.0.0.1:{port}"}
    files = {"MLX_IBV_DEVICES": json.dumps([[None] * size] * size)}
    orders = [
        rendezvous_order(rank, size, "jaccl", environment, files, limit_s) for rank in range(size)
    ]
    return orders, ("127.0.0.1", port)


def run_rendezvous(one: JoinWorld) -> str:
    """Let one rank meet; return what it says, "" if nothing is wrong."""
    try:
        rendezvous.wait_for_ranks(one)
    except RanksUnreachable as error:
        return str(error)
    return ""


def run_all_rendezvous(orders: list[JoinWorld]) -> list[str]:
    """Let all meet at once; return what each of them says."""
    with ThreadPoolExecutor(len(orders)) as pool:
        return list(pool.map(run_rendezvous, orders))


def connect_when_listening(place: Address) -> socket.socket:
    """Connect as soon as somebody listens there."""
    until_s = time.monotonic() + LONG_S
    while True:
        try:
            return socket.create_connection(place, 5.0)
        except ConnectionRefusedError:
            assert time.monotonic() < until_s
            time.sleep(0.01)
