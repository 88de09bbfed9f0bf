"""Makes the sockets of MLX's ring blocking, for hosts with too few cores to poll. No MLX.

MLX's ring polls non-blocking sockets in a loop during a collective. That is fastest with a core per
thread. With fewer, the polling threads delay the one that they wait for: a small sum over 4 ranks
on 2 busy cores took 100 ms, and 0.6 ms with blocking sockets (2 ranks: 5 to 16, and 0.1 to 0.3).
"""

import json
import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

TIMEOUT_US = 1_000
"""Socket timeout, after which a thread that sends and receives tries the other direction."""

POLLING_CORES_PER_RANK = 4
"""Cores that a rank needs for polling: two socket threads, MLX's stream, and Python."""


def make_blocking(hostfile_text: str) -> int:
    """Make this process's ring connections blocking; to be called after joining the ring.

    Args:
        hostfile_text: content of `MLX_HOSTFILE`, which has one end of each connection.

    Returns:
        The number of ring connections.
    """
    addresses = {_resolved(address) for rank in json.loads(hostfile_text) for address in rank}
    found = 0
    for name in [path.name for path in Path("/proc/self/fd").iterdir()]:
        # The list includes its own descriptor, which is closed by now.
        with suppress(OSError):
            descriptor = int(name)
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                found += _make_blocking(descriptor, addresses)
    return found


def _resolved(address: str) -> str:
    """Return host:port with the host's IP address instead of its name."""
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        host = socket.gethostbyname(host)
    return f"{host}:{port}"


def _make_blocking(descriptor: int, addresses: set[str]) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as link:
        if link.family != socket.AF_INET or link.type != socket.SOCK_STREAM:
            return False
        ends = (link.getsockname(), link.getpeername())
        if not any(f"{host}:{port}" in addresses for host, port in ends):
            return False
        # These are properties of the connection, so MLX's own descriptor is changed too.
        # The timeouts prevent a thread that must send from waiting for ever to receive.
        timeout = struct.pack("ll", 0, TIMEOUT_US)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        link.setblocking(True)
    return True
