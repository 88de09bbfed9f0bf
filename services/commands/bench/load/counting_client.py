"""Clients of the gateway benchmark: read many streams as fast as they come, and only count.

The feeder learns through a number in shared memory how many tokens have arrived, stays a fixed
number of steps ahead of it, and so overflows no stream's buffer. A process of its own; JSON lines
in and out.

    python -m services.commands.bench.load.counting_client PROGRESS_FILE
"""

import json
import mmap
import os
import selectors
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from services.commands.bench.load.closed_loop_client import encode_request
from services.commands.bench.measuring.numbers import percentile

_COUNT = struct.Struct("<Q")
_READ_BYTES = 256 * 1024
EVENT = b"data: "
DONE = b"data: [DONE]"


class SharedCounter:
    """One number in a file that two processes map."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, _COUNT.size)
        self._memory = mmap.mmap(descriptor, _COUNT.size)
        os.close(descriptor)

    def set(self, count: int) -> None:
        """Publish the number."""
        _COUNT.pack_into(self._memory, 0, count)

    def get(self) -> int:
        """Read the number."""
        count: int = _COUNT.unpack_from(self._memory, 0)[0]
        return count


class MarkCounter:
    """Counts marks in a stream of bytes that is cut anywhere."""

    def __init__(self, mark: bytes) -> None:
        self.count = 0
        self._mark = mark
        self._tail = b""

    def feed(self, data: bytes) -> int:
        """Take the next bytes; return how many marks ended in them."""
        joined = self._tail + data
        found = joined.count(self._mark)
        self.count += found
        keep = len(self._mark) - 1
        self._tail = joined[-keep:] if keep else b""
        return found


class _Stream:
    def __init__(self, port: int, request: bytes, mark: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(request)
        self.socket.setblocking(False)
        self.tokens = MarkCounter(mark)
        self.events = MarkCounter(EVENT)
        self.done = MarkCounter(DONE)
        self.head = b""


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
    """Open the streams and count until all have ended.

    Returns:
        Totals, seconds from the first token to the last, and the reason when something failed.
    """
    request = encode_request("127.0.0.1", port, path, body)
    progress.set(0)
    open_streams = [_Stream(port, request, mark.encode()) for _ in range(streams)]
    selector = selectors.DefaultSelector()
    for one in open_streams:
        selector.register(one.socket, selectors.EVENT_READ, one)
    total = 0
    began_s = ended_s = 0.0
    failure = ""
    until_s = time.perf_counter() + timeout_s
    while selector.get_map() and time.perf_counter() < until_s:
        for key, _ in selector.select(1.0):
            one = key.data
            data = one.socket.recv(_READ_BYTES)
            if len(one.head) < 512:
                one.head += data[:512]
            found = one.tokens.feed(data)
            one.events.feed(data)
            if found:
                ended_s = time.perf_counter()
                began_s = began_s or ended_s
                total += found
                progress.set(total)
            if one.done.feed(data) or not data:
                selector.unregister(one.socket)
                one.socket.close()
                if not one.done.count:
                    failure = failure or f"a stream was cut: {one.head[:300]!r}"
    for key in list(selector.get_map().values()):
        key.data.socket.close()
        failure = failure or "streams did not end in time"
    events = sum(one.events.count for one in open_streams) - streams
    counts = [float(one.tokens.count) for one in open_streams]
    return {
        "tokens": total,
        "tokens_per_stream_min": percentile(counts, 0.0),
        "events": events,
        "wall_s": ended_s - began_s,
        "failure": failure,
    }


def main(progress_file: str, orders: TextIO, answers: TextIO) -> None:
    """Measure what each line of `orders` asks for."""
    progress = SharedCounter(Path(progress_file))
    for line in orders:
        order = json.loads(line)
        try:
            result = count_streams(progress=progress, **order)
        except OSError as error:
            result = {"failure": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin, sys.stdout)
