"""What two ranks say to each other when they meet, and how it is read from a socket. No MLX.

The caller connects to the door of another rank. A line each, in this order:

    caller  lockstep EPOCH RANK WORLD
    door    lockstep here
    caller  lockstep heard
    door    lockstep met

The third tells that the caller is still there: a greeting lies in a buffer long after who has sent
it has given up. The fourth comes when everybody has, and the door is closed.
"""

import hashlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Literal

from shared.messages import JoinWorld

HERE = b"lockstep here\n"
HEARD = b"lockstep heard\n"
MET = b"lockstep met\n"
OTHER = b"lockstep other\n"
"""To a rank of another epoch or world."""
WITHOUT = b"lockstep without "
"""To who has waited in vain; the ranks that have not come follow, with commas between them."""

LINE_BYTES_MAX = 256
"""The longest line names 64 ranks."""

TRY_S = 2.0
"""A line that is due at once may take so long."""

_ROOTS = ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP", "NCCL_PORT")


def ring_rows(files: Mapping[str, str]) -> list[list[str]]:
    """Return the ring's addresses by rank, [] where the world is no ring of ours."""
    rows: list[list[str]] = json.loads(files.get("MLX_HOSTFILE", "[]"))
    return rows


def greeting(order: JoinWorld) -> bytes:
    """Return what a caller says first."""
    return f"lockstep {order.epoch} {order.rank} {_world(order)}\n".encode()


def greeted(line: bytes, order: JoinWorld) -> int | Literal["stranger", "other"]:
    """Return the rank that a first line names.

    "stranger": it is no greeting. "other": it is one of another epoch or world, or of no rank.
    """
    words = line.split()
    if len(words) != 4 or words[0] != b"lockstep" or not line.endswith(b"\n"):
        return "stranger"
    own = [str(order.epoch).encode(), _world(order).encode()]
    if [words[1], words[3]] != own or not words[2].isdigit():
        return "other"
    return int(words[2])


def without(ranks: list[int]) -> bytes:
    """Return the line that says who has not come."""
    return WITHOUT + ",".join(map(str, ranks)).encode() + b"\n"


def read_line(link: socket.socket, until_s: float) -> bytes:
    """Return what a peer says up to the end of its first line, or until it ends or time does.

    Raises:
        TimeoutError: it has said nothing until then, a monotonic second.
        OSError: the connection is broken.
    """
    text = b""
    while not text.endswith(b"\n") and len(text) < LINE_BYTES_MAX:
        left_s = until_s - time.monotonic()
        try:
            if left_s <= 0.0:
                raise TimeoutError
            link.settimeout(left_s)
            # Byte by byte, so that nothing of the next line is taken.
            part = link.recv(1)
        except TimeoutError:
            if text:
                break
            raise
        if not part:
            break
        text += part
    return text


def _world(order: JoinWorld) -> str:
    """Return what all ranks of a world have in common, and those of others hardly."""
    roots = [order.environment.get(name, "") for name in _ROOTS]
    facts = [order.backend, order.world_size, roots, sorted(order.files.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
