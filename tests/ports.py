"""Ports for what tests start, and nobody else on this machine."""

import random
import socket

_PORTS = range(20_000, 30_000)
"""Below those that systems give to connections that are being made. A client that keeps trying a
port of theirs while nobody listens connects to itself one day, and holds the port."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on, and that no other test is given.

    Between here and the `bind` of the process that it is for, tests that run at the same time ask
    too. So a port is claimed by binding its UDP namesake, which nothing of ours uses, until this
    process ends.
    """
    while True:
        port = random.choice(_PORTS)
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        # Open as long as the process is, whoever collects garbage.
        claim.detach()
        if is_free(port):
            return port


def is_free(port: int) -> bool:
    """Tell whether a server could listen on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
