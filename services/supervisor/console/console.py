"""What the supervisor shows: every role's lines with its name, and one line of progress.

Several threads write lines (one per child); a lock keeps them whole. On a terminal names are
coloured and the progress line is redrawn below the last line; elsewhere progress is a line when it
changes.
"""

import contextlib
import os
import threading
from typing import TextIO

from services.supervisor.console.leaky_stream import NonBlockingStream

_COLOURS = (36, 33, 35, 32, 34, 31)
_NAME_WIDTH = 9
_ERASE_LINE = "\r\x1b[2K"


class Console:
    """One output stream shared by the supervisor and its children's log lines."""

    def __init__(self, stream: TextIO | NonBlockingStream) -> None:
        """Write to `stream`; it counts as a terminal unless NO_COLOR or TERM=dumb say otherwise."""
        self._stream = stream
        self._lock = threading.Lock()
        self._progress = ""
        self._colours: dict[str, int] = {}
        self.lost: OSError | None = None
        """Why something that was said could not be written; a reader that has gone is no loss."""
        self.is_terminal = (
            stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        )

    def line(self, role: str, text: str) -> None:
        """Write one line of a role's log."""
        with self._lock:
            self._write(f"{self._name(role)} {text}\n")

    def say(self, text: str) -> None:
        """Write the supervisor's own words, without a name before them."""
        with self._lock:
            self._write(f"{text}\n")

    def progress(self, text: str) -> None:
        """Show `text` as the progress line; "" removes it. What stands there is not repeated."""
        with self._lock:
            if text == self._progress:
                return
            self._progress = text
            if self.is_terminal:
                self._write("")
            elif text:
                self._write(f"{text}\n")

    def flush(self, wait_s: float = 0.0) -> None:
        """Write what a leaky stream could not take before; wait at most so long for its reader."""
        if isinstance(self._stream, NonBlockingStream):
            with self._lock, contextlib.suppress(OSError, ValueError):
                self._stream.flush(wait_s)

    def _name(self, role: str) -> str:
        name = role.ljust(_NAME_WIDTH)
        if not self.is_terminal:
            return f"{name} |"
        colour = self._colours.setdefault(role, _COLOURS[len(self._colours) % len(_COLOURS)])
        return f"\x1b[{colour}m{name} |\x1b[0m"

    def _write(self, text: str) -> None:
        # A reader that has gone away must not keep the supervisor from stopping its children.
        if self.is_terminal:
            text = _ERASE_LINE + text + self._progress
        try:
            self._stream.write(text)
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            pass
        except OSError as error:
            self.lost = self.lost or error
