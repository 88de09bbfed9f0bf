"""Output of `lockstep up`: log lines with role names and one progress line.

Owns the layout, and that writing never blocks. Several threads write, one per child. On a terminal
role names are coloured and the progress line is redrawn below the last line; elsewhere each new
progress text is a line of its own. With JSON, every line is one object: a child's
log line as it is, and any other line of a child in an object of its own.

Written by hand instead of with `rich`: a stopped terminal (Ctrl-S) or a pager that does not read
must block neither the supervisor nor its children's logs, and `rich` writes to blocking streams.
"""

import contextlib
import os
import select
import threading
import time
from collections import deque
from typing import Literal, TextIO

from shared.log import lines
from shared.log.files import LogFile
from shared.log.lines import Line

SUPERVISOR = "lockstep"
"""Name of the supervisor in log lines."""

Level = Literal["info", "warning", "error"]

UNREAD_BYTES_MAX = 1 << 20
"""Unread bytes that are kept, about ten thousand lines."""

_COLOURS = (36, 33, 35, 32, 34, 31)
_NAME_WIDTH = 9
_ERASE_LINE = "\r\x1b[2K"
_CHUNK_BYTES = min(512, select.PIPE_BUF)
"""Bytes per write: a pipe that `select` reports as writable takes this many without blocking."""


class NonBlockingStream:
    """Output that never blocks its writer: it queues unread text and drops text over a bound."""

    def __init__(self, stream: TextIO, *, as_json: bool = False) -> None:
        """Take over `stream`, which must have no other writer.

        Args:
            stream: the output.
            as_json: whether the note about dropped lines is a JSON line.

        Raises:
            OSError: when it has no descriptor.
        """
        self._descriptor = stream.fileno()
        self._as_json = as_json
        self._encoding = stream.encoding or "utf-8"
        self._is_terminal = stream.isatty()
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._lines_dropped = 0
        stream.flush()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._is_terminal

    def write(self, text: str) -> int:
        """Queue a text for `flush`; drop it if more than `UNREAD_BYTES_MAX` would be queued.

        Dropped texts are counted, and a line with the count follows later.

        Returns:
            The length of `text` in characters, also if it was dropped.
        """
        data = text.encode(self._encoding, errors="replace")
        if self._unread_bytes + len(data) > UNREAD_BYTES_MAX:
            self._lines_dropped += 1
            return len(text)
        if self._lines_dropped:
            note = f"({self._lines_dropped:,} lines dropped here: the output was not read in time)"
            if self._as_json:
                note = lines.encode(lines.make(SUPERVISOR, note, {}, level="warning"))
            self._lines_dropped = 0
            self._queue(f"{note}\n".encode(self._encoding))
        self._queue(data)
        return len(text)

    def flush(self, wait_s: float = 0.0) -> None:
        """Write queued text, waiting at most `wait_s` seconds for the reader.

        Raises:
            OSError: when the reader has closed the stream or the disk is full; the queue is
                discarded.
        """
        until_s = time.monotonic() + wait_s
        try:
            while self._unread:
                left_s = max(0.0, until_s - time.monotonic())
                if not select.select([], [self._descriptor], [], left_s)[1]:
                    return
                data = self._unread[0]
                written = os.write(self._descriptor, data[:_CHUNK_BYTES])
                self._unread_bytes -= written
                self._unread[0] = data[written:]
                if not self._unread[0]:
                    self._unread.popleft()
        except (OSError, ValueError):
            self._unread.clear()
            self._unread_bytes = 0
            raise

    def _queue(self, data: bytes) -> None:
        if data:
            self._unread.append(data)
            self._unread_bytes += len(data)


def non_blocking(stream: TextIO, *, as_json: bool = False) -> "NonBlockingStream | TextIO":
    """Return a non-blocking stream over `stream`, or `stream` itself if it has no descriptor.

    Args:
        stream: the output.
        as_json: as for `NonBlockingStream`.
    """
    with contextlib.suppress(OSError, ValueError):
        return NonBlockingStream(stream, as_json=as_json)
    return stream


class Console:
    """Output of `lockstep up`: log lines of all roles and one progress line. Thread-safe."""

    def __init__(
        self,
        stream: TextIO | NonBlockingStream | None,
        *,
        as_json: bool = False,
        file: LogFile | None = None,
    ) -> None:
        """Prepare the output. NO_COLOR or TERM=dumb turn colours and redrawing off.

        Args:
            stream: the output; None: only the file.
            as_json: whether the output gets JSON lines instead of text.
            file: gets all lines too, as JSON.
        """
        self._stream = stream
        self._as_json = as_json
        self._file = file
        self._lock = threading.Lock()
        self._progress = ""
        self._colours: dict[str, int] = {}
        self.write_error: OSError | None = None
        """First error of a write, such as a full disk. A reader that has gone is no error."""
        self.is_terminal = (
            stream is not None
            and not as_json
            and stream.isatty()
            and "NO_COLOR" not in os.environ
            and os.environ.get("TERM") != "dumb"
        )

    def log_line(self, text: str, level: Level = "info") -> None:
        """Write a line of the supervisor about a role or the whole of Lockstep.

        Args:
            text: the sentence.
            level: how important it is, in JSON lines.
        """
        line = lines.make(SUPERVISOR, text, {}, level=level)
        with self._lock:
            self._write_line(line, f"{self._name(SUPERVISOR)} {text}")

    def forward_line(self, name: str, text: str) -> None:
        """Write a line that a role's process wrote, with the role's name before it.

        Args:
            name: name of the role, for example `rank 0`.
            text: the line without its end: a log line in JSON, or anything else.
        """
        line = lines.decode(text, name)
        with self._lock:
            start = self._name(name)
            shown = lines.render(line).splitlines() or [""]
            self._write_line(line, "\n".join(f"{start} {part}" for part in shown))

    def print_line(self, text: str) -> None:
        """Write a text without a role name; its lines are one event each in JSON."""
        with self._lock:
            self._print(text)

    def show_progress(self, text: str) -> None:
        """Show a text as the progress line, which the next text replaces on a terminal.

        Elsewhere each new text is a line of its own. An unchanged text is not written again.

        Args:
            text: the line; "" removes the progress line.
        """
        with self._lock:
            if text == self._progress:
                return
            self._progress = text
            if self.is_terminal:
                self._write("")
            elif text:
                self._print(text)

    def flush(self, wait_s: float = 0.0) -> None:
        """Write queued text, waiting at most `wait_s` seconds for the reader of the output.

        Does nothing for a stream that is not a `NonBlockingStream`, because its text was written at
        once. Ignores errors.
        """
        if isinstance(self._stream, NonBlockingStream):
            with self._lock, contextlib.suppress(OSError, ValueError):
                self._stream.flush(wait_s)

    def _print(self, text: str) -> None:
        events = [lines.make(SUPERVISOR, part, {}) for part in text.splitlines() if part]
        if self._file is not None:
            for event in events:
                self._file.write_line(lines.encode(event))
        shown = map(lines.encode, events) if self._as_json else [text]
        self._write("".join(f"{part}\n" for part in shown))

    def _write_line(self, line: Line, text: str) -> None:
        encoded = lines.encode(line)
        if self._file is not None:
            self._file.write_line(encoded)
        self._write(f"{encoded if self._as_json else text}\n")

    def _name(self, role: str) -> str:
        name = role.ljust(_NAME_WIDTH)
        if not self.is_terminal:
            return f"{name} |"
        colour = self._colours.setdefault(role, _COLOURS[len(self._colours) % len(_COLOURS)])
        return f"\x1b[{colour}m{name} |\x1b[0m"

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        if self.is_terminal:
            text = _ERASE_LINE + text + self._progress
        try:
            self._stream.write(text)
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            # Children must be stopped in order even after the reader has gone.
            pass
        except OSError as error:
            self.write_error = self.write_error or error
