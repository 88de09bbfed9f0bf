"""Standard streams of a process that was started with some of them closed (`>&-`, some launchers).

The next file or pipe that is opened gets the free number, and a child takes it for its output. And
standard output that takes nothing.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from shared.errors import OutputLost


def replace_closed() -> None:
    """Open the null device in the place of each that is closed; call before anything is opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is given, which is this one.
            os.open(os.devnull, os.O_RDWR)
    null = Path(os.devnull)
    sys.stdin = sys.stdin or null.open(encoding="utf-8")
    sys.stdout = sys.stdout or null.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or null.open("w", encoding="utf-8")


def print_line(text: str) -> None:
    """Write what a command has found to standard output, with a line's end.

    Raises:
        OutputLost: it takes nothing, as on a full disk.
        BrokenPipeError: whoever read it has gone.
    """
    with _writing():
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def flush() -> None:
    """Write what is still kept for standard output. Raises as `print_line`."""
    with _writing():
        sys.stdout.flush()


def exit_code_if_written(code: int, lost: OSError | None) -> int:
    """Return an exit code if what led to it could be written; raise `OutputLost` for `lost`."""
    if lost is not None:
        raise _output_lost(lost)
    return code


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _output_lost(error) from error


def _output_lost(error: OSError) -> OutputLost:
    discard_output()
    return OutputLost(f"Cannot write to standard output: {error.strerror}.")


def discard_output() -> None:
    """Have standard output end nowhere: Python would complain once more when it flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
