"""Output of processes: all lines in a file, the last ones in memory with their times."""

import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

LINES_KEPT = 4_000


class LogLines:
    """Lines of one or several processes."""

    def __init__(self, file: Path) -> None:
        """Append all lines to `file`."""
        self.file = file
        self._stream = file.open("a", encoding="utf-8")
        self._lines: deque[tuple[float, str]] = deque(maxlen=LINES_KEPT)
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []

    def read(self, pipe: IO[str], name: str = "") -> None:
        """Read a pipe to its end in a thread, then close it."""
        reader = threading.Thread(target=self._read, args=(pipe, name), daemon=True)
        reader.start()
        # A stack that restarts roles for an hour may not collect ended threads.
        self._readers = [one for one in self._readers if one.is_alive()] + [reader]

    def note(self, text: str) -> None:
        """Add a line of the harness, so that the file shows when each fault was injected."""
        self._add(f"chaos     | {text}")

    def since(self, at_s: float, text: str) -> list[str]:
        """Return the lines that contain `text` and arrived at or after `at_s` (monotonic)."""
        with self._lock:
            return [line for when_s, line in self._lines if when_s >= at_s and text in line]

    def first_s(self, text: str) -> float | None:
        """Return the time of the first line in memory that contains `text`; None without one."""
        with self._lock:
            return next((when_s for when_s, line in self._lines if text in line), None)

    def tail(self, count: int = 60) -> str:
        """Return the last `count` lines."""
        with self._lock:
            return "\n".join(line for _, line in list(self._lines)[-count:])

    def close(self) -> None:
        """Wait for readers whose processes have ended, and close the file."""
        for reader in self._readers:
            reader.join(5.0)
        self._stream.close()

    def _read(self, pipe: IO[str], name: str) -> None:
        with pipe:
            for line in pipe:
                text = line.rstrip()
                self._add(f"{name:<9} | {text}" if name else text)

    def _add(self, line: str) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._lines.append((now_s, line))
            if not self._stream.closed:
                self._stream.write(f"{now_s:.3f} {line}\n")
                self._stream.flush()
