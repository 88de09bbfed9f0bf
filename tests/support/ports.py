"""Free TCP ports of 127.0.0.1 for servers that tests start."""

import random
import socket

_PORTS = range(20_000, 30_000)
"""Below the ephemeral ports. A client that dials an unused ephemeral port again and again can
connect to itself and then occupies the port."""


def free_port() -> int:
    """Return a port of 127.0.0.1 on which no process listens, and which no other test gets.

    Other tests may ask for a port before the process under test binds this one. The port is
    therefore claimed until this test process ends, by binding the UDP port of the same number,
    which Lockstep does not use.
    """
    while True:
        port = random.choice(_PORTS)
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        # Detached, so that garbage collection does not close it before the process ends.
        claim.detach()
        if is_free(port):
            return port


def is_free(port: int) -> bool:
    """Tell whether a server can listen on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
