"""Client of the gateway benchmark: reads many streams as fast as possible and counts their tokens.

A number in shared memory tells the sender how many tokens have arrived, so that it can stay a fixed
number of steps ahead and overflow no stream's buffer. A process of its own, which reads orders and
writes results as JSON lines.

    python -m services.commands.bench.load.counting_client PROGRESS_FILE
"""

import mmap
import os
import selectors
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from services.commands.bench.load.load_client import HOST, encode_request
from services.commands.bench.measuring.orders import answer_orders

_COUNT = struct.Struct("<Q")
_READ_BYTES = 256 * 1024
CHUNK_END = b"\n\n\r\n"
"""End of a chunk, which holds the events of one write of the gateway."""
DONE = b"data: [DONE]"


class SharedCounter:
    """A 64-bit count in a file that two processes map: one writes it, the other reads it."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, _COUNT.size)
        self._memory = mmap.mmap(descriptor, _COUNT.size)
        os.close(descriptor)

    def set(self, count: int) -> None:
        """Write the count, which the other process sees at once."""
        _COUNT.pack_into(self._memory, 0, count)

    def get(self) -> int:
        """Return the count that was written last."""
        count: int = _COUNT.unpack_from(self._memory, 0)[0]
        return count


class MarkCounter:
    """Counts how often a byte string, the mark, occurs in a stream that arrives in pieces."""

    def __init__(self, mark: bytes) -> None:
        self.count = 0
        self._mark = mark
        self._tail = b""

    def feed(self, data: bytes) -> int:
        """Count the marks that end in the next piece of the stream, add them to `count`.

        Args:
            data: the next bytes; a mark may begin in earlier ones.

        Returns:
            The number of marks that end in this piece.
        """
        joined = self._tail + data
        found = joined.count(self._mark)
        self.count += found
        keep = len(self._mark) - 1
        self._tail = joined[-keep:] if keep else b""
        return found


class _Stream:
    def __init__(self, port: int, request: bytes, mark: bytes) -> None:
        self.socket = socket.create_connection((HOST, port))
        self.socket.sendall(request)
        self.socket.setblocking(False)
        self.tokens = MarkCounter(mark)
        self.chunks = MarkCounter(CHUNK_END)
        self.done = MarkCounter(DONE)
        self.first_bytes = b""


def count_streams(
    *,
    port: int,
    path: str,
    body: dict[str, Any],
    streams: int,
    mark: str,
    progress: SharedCounter,
    timeout_s: float,
) -> dict[str, Any]:
    """Send the same request on many connections and count the tokens until all have ended.

    Args:
        port: the gateway's port on this machine.
        path: path of the endpoint.
        body: the request that each stream sends.
        streams: number of streams.
        mark: text that each token contains exactly once.
        progress: receives the number of tokens that have arrived over all streams.
        timeout_s: seconds after which streams that have not ended count as failed.

    Returns:
        tokens and chunks: totals over all streams; wall_s: seconds from the first token to the
        last; failure: "" or the first reason for which the measurement is void.

    Raises:
        OSError: when a connection fails.
    """
    request = encode_request(port, path, body)
    progress.set(0)
    open_streams = [_Stream(port, request, mark.encode()) for _ in range(streams)]
    wall_s, failure = _read_until_ended(open_streams, progress, timeout_s)
    return {
        "tokens": sum(stream.tokens.count for stream in open_streams),
        "chunks": sum(stream.chunks.count for stream in open_streams),
        "wall_s": wall_s,
        "failure": failure,
    }


def _read_until_ended(
    open_streams: list[_Stream], progress: SharedCounter, timeout_s: float
) -> tuple[float, str]:
    """Return the seconds from the first token to the last, and "" or the first failure."""
    selector = selectors.DefaultSelector()
    for stream in open_streams:
        selector.register(stream.socket, selectors.EVENT_READ, stream)
    total = 0
    began_s = ended_s = 0.0
    failure = ""
    until_s = time.perf_counter() + timeout_s
    while selector.get_map() and time.perf_counter() < until_s:
        for key, _ in selector.select(1.0):
            stream = key.data
            data = stream.socket.recv(_READ_BYTES)
            if len(stream.first_bytes) < 512:
                stream.first_bytes += data[:512]
            found = stream.tokens.feed(data)
            stream.chunks.feed(data)
            if found:
                ended_s = time.perf_counter()
                began_s = began_s or ended_s
                total += found
                progress.set(total)
            if stream.done.feed(data) or not data:
                selector.unregister(stream.socket)
                stream.socket.close()
                if not stream.done.count:
                    failure = failure or f"a stream was cut: {stream.first_bytes[:300]!r}"
    for key in list(selector.get_map().values()):
        key.data.socket.close()
        failure = failure or "streams did not end in time"
    return ended_s - began_s, failure


def measure(progress: SharedCounter, order: dict[str, Any]) -> dict[str, Any]:
    """Run one measurement; return the result of `count_streams` or, when it fails, "failure".

    Args:
        progress: receives the number of tokens that have arrived.
        order: the other arguments of `count_streams`.
    """
    try:
        return count_streams(progress=progress, **order)
    except OSError as error:
        return {"failure": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    counter = SharedCounter(Path(sys.argv[1]))
    answer_orders(lambda **order: measure(counter, order))
