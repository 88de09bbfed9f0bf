"""A server of the standard library, in a thread of the test's own process."""

import contextlib
import socketserver
import threading
from collections.abc import Iterator

_LOOK_S = 0.01
"""How often it looks whether it shall end."""


@contextlib.contextmanager
def run_in_background(server: socketserver.BaseServer) -> Iterator[None]:
    """Serve inside the block; behind it the server is closed and its thread has ended."""
    thread = threading.Thread(target=server.serve_forever, args=(_LOOK_S,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
