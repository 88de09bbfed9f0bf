"""Ports for what this harness starts."""

import random
import socket

_PORTS = range(20_000, 30_000)
"""Below those that systems give to connections that are being made. A client that keeps trying a
port of theirs while nobody listens connects to itself one day, and holds the port."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on at the moment."""
    return next(port for port in iter(lambda: random.choice(_PORTS), 0) if is_free(port))


def is_free(port: int) -> bool:
    """Tell whether a server could listen on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
