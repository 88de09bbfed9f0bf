"""Lets the ring's threads sleep while they wait, where cores are too few to spin on. No MLX.

MLX's ring asks its non-blocking sockets in a loop, on every rank, for as long as a collective
lasts. With a core for each thread that is fastest. Without, the thread that the others wait for
gets its turn after scheduler ticks: one small sum over 4 ranks on 2 busy cores took 100 ms, and
0.6 ms with sockets that wait in the kernel (2 ranks: 5 to 16 ms, and 0.1 to 0.3).
"""

import json
import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

WAIT_US = 1_000
"""A thread that is to send and to receive turns to the other so often, or once a tick."""

CORES_PER_RANK_ENOUGH = 4
"""Cores that a rank can spin on: two socket threads, MLX's stream, and Python."""


def wait_in_kernel(hostfile_text: str) -> int:
    """Make this process's connections of the ring wait in the kernel; call when it is joined.

    Args:
        hostfile_text: what `MLX_HOSTFILE` holds; one end of each connection is there.

    Returns:
        How many connections there are.
    """
    addresses = {_with_number(address) for rank in json.loads(hostfile_text) for address in rank}
    found = 0
    for name in [path.name for path in Path("/proc/self/fd").iterdir()]:
        # The descriptor of this very listing is in it, and gone.
        with suppress(OSError):
            descriptor = int(name)
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                found += _change(descriptor, addresses)
    return found


def _with_number(address: str) -> str:
    """Return host:port with the number of a host that the hostfile has by name."""
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        host = socket.gethostbyname(host)
    return f"{host}:{port}"


def _change(descriptor: int, addresses: set[str]) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as link:
        if link.family != socket.AF_INET or link.type != socket.SOCK_STREAM:
            return False
        ends = (link.getsockname(), link.getpeername())
        if not any(f"{host}:{port}" in addresses for host, port in ends):
            return False
        # All of this belongs to the connection, not to the descriptor, so MLX's is changed as well.
        # The timeouts keep a thread with something to send from waiting for ever to receive.
        timeout = struct.pack("ll", 0, WAIT_US)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        link.setblocking(True)
    return True
