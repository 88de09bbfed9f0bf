"""A server of the standard library in a thread of the test process."""

import contextlib
import socketserver
import threading
from collections.abc import Iterator

_SHUTDOWN_POLL_S = 0.01


@contextlib.contextmanager
def run_in_background(server: socketserver.BaseServer) -> Iterator[None]:
    """Serve requests inside the block; after it the server is closed and its thread has ended."""
    thread = threading.Thread(target=server.serve_forever, args=(_SHUTDOWN_POLL_S,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
