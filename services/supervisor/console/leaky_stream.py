"""A stream that never makes its writer wait: what nobody reads is kept up to a bound, then dropped.

A terminal that was stopped (Ctrl-S) or a pager that nobody scrolls reads no more. Whoever waits for
it to go on cannot look after children, and children whose log nobody takes wait as well.
"""

import contextlib
import os
import select
import time
from collections import deque
from typing import TextIO

BYTES_MAX = 1 << 20
"""Unread bytes that are kept: some ten thousand lines."""

_CHUNK_BYTES = min(512, select.PIPE_BUF)
"""Written at once: what a pipe takes without waiting when `select` says that it takes something."""


class NonBlockingStream:
    """Writes to the descriptor of a stream as far as that can be done now."""

    def __init__(self, stream: TextIO) -> None:
        """Take over a stream; nobody else may write to it.

        Raises:
            OSError: it has no descriptor.
        """
        self._descriptor = stream.fileno()
        self._encoding = stream.encoding or "utf-8"
        self._is_terminal = stream.isatty()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        stream.flush()

    def isatty(self) -> bool:
        """Tell whether this is a terminal."""
        return self._is_terminal

    def write(self, text: str) -> int:
        """Take a text, to be written by `flush`; drop it whole when too much is unread."""
        data = text.encode(self._encoding, errors="replace")
        if self._waiting_bytes + len(data) > BYTES_MAX:
            self._dropped += 1
            return len(text)
        if self._dropped:
            note = f"({self._dropped:,} lines are missing here: nobody read them in time)\n"
            self._dropped = 0
            self._put(note.encode(self._encoding))
        self._put(data)
        return len(text)

    def flush(self, wait_s: float = 0.0) -> None:
        """Write what can be written, and wait at most so long for more; what fails is given up.

        Raises:
            OSError: nobody will read it any more, or the disk is full.
        """
        until_s = time.monotonic() + wait_s
        try:
            while self._waiting:
                left_s = max(0.0, until_s - time.monotonic())
                if not select.select([], [self._descriptor], [], left_s)[1]:
                    return
                data = self._waiting[0]
                written = os.write(self._descriptor, data[:_CHUNK_BYTES])
                self._waiting_bytes -= written
                self._waiting[0] = data[written:]
                if not self._waiting[0]:
                    self._waiting.popleft()
        except (OSError, ValueError):
            self._waiting.clear()
            self._waiting_bytes = 0
            raise

    def _put(self, data: bytes) -> None:
        if data:
            self._waiting.append(data)
            self._waiting_bytes += len(data)


def of(stream: TextIO) -> "NonBlockingStream | TextIO":
    """Return a stream that makes nobody wait; one without a descriptor stays what it is."""
    with contextlib.suppress(OSError, ValueError):
        return NonBlockingStream(stream)
    return stream
