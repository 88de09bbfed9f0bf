"""The messages that two ranks exchange in the rendezvous, and how they are read. No MLX.

The client connects to the server of another rank. They send one line each, in this order:

    client  lockstep EPOCH RANK WORLD
    server  lockstep here
    client  lockstep heard
    server  lockstep met

The third line shows that the client is still connected: its greeting may stay in a buffer long
after the client has given up. The fourth line is sent when all ranks have connected and the server
has stopped listening.
"""

import hashlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Literal

from shared.messages import JoinWorld

WELCOME = b"lockstep here\n"
CONFIRMATION = b"lockstep heard\n"
COMPLETE = b"lockstep met\n"
REFUSED = b"lockstep other\n"
"""Sent to a rank of another epoch or world."""
INCOMPLETE = b"lockstep without "
"""Sent when the deadline has passed, followed by the missing ranks, separated by commas."""

LINE_BYTES_MAX = 256
"""Enough for a line that lists 64 ranks."""

REPLY_TIMEOUT_S = 2.0
"""Limit for a line that the other side can send at once."""

_ROOT_VARIABLES = ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP", "NCCL_PORT")


def ring_addresses(files: Mapping[str, str]) -> list[list[str]]:
    """Return the ring's addresses by rank; [] when the scheduler sent no hostfile.

    Args:
        files: contents of the files in the order to join, by the variable that names the file.
    """
    rows: list[list[str]] = json.loads(files.get("MLX_HOSTFILE", "[]"))
    return rows


def greeting(order: JoinWorld) -> bytes:
    """Return the client's first line: epoch, own rank, and a digest of the world's settings."""
    return f"lockstep {order.epoch} {order.rank} {_world_digest(order)}\n".encode()


def parse_greeting(line: bytes, order: JoinWorld) -> int | Literal["invalid", "other"]:
    """Read a client's first line.

    Args:
        line: the bytes received, line end included.
        order: this rank's order to join, whose epoch and world the line must name.

    Returns:
        The client's rank; "invalid" when the line is not a greeting; "other" when it is one of
        another epoch or world, or contains no rank.
    """
    words = line.split()
    if len(words) != 4 or words[0] != b"lockstep" or not line.endswith(b"\n"):
        return "invalid"
    own = [str(order.epoch).encode(), _world_digest(order).encode()]
    if [words[1], words[3]] != own or not words[2].isdigit():
        return "other"
    return int(words[2])


def incomplete(ranks: list[int]) -> bytes:
    """Return the server's last line when ranks are missing at the deadline.

    Args:
        ranks: the ranks that did not connect.
    """
    return INCOMPLETE + ",".join(map(str, ranks)).encode() + b"\n"


def read_line(link: socket.socket, deadline_s: float) -> bytes:
    """Return the peer's next line, or less when the connection ends or the deadline passes.

    Args:
        link: a connected socket.
        deadline_s: in seconds of `time.monotonic`.

    Raises:
        TimeoutError: when nothing arrives before the deadline.
        OSError: when the connection is broken.
    """
    text = b""
    while not text.endswith(b"\n") and len(text) < LINE_BYTES_MAX:
        left_s = deadline_s - time.monotonic()
        try:
            if left_s <= 0.0:
                raise TimeoutError
            link.settimeout(left_s)
            # Byte by byte, so that the next line stays in the socket.
            part = link.recv(1)
        except TimeoutError:
            if text:
                break
            raise
        if not part:
            break
        text += part
    return text


def _world_digest(order: JoinWorld) -> str:
    """Return a digest of the facts that are equal on all ranks of a world."""
    roots = [order.environment.get(name, "") for name in _ROOT_VARIABLES]
    facts = [order.backend, order.world_size, roots, sorted(order.files.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
