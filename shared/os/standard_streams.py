"""Standard streams of a process. Owns closed streams at start and failing output.

Some launchers start a process with closed streams (`>&-`). The next opened file or pipe would then
get the number of a standard stream, and a child would write its output there.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from shared.errors import OutputLost


def replace_closed() -> None:
    """Open the null device in place of each closed stream. Call it before opening other files."""
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
    """Write a line to standard output.

    Raises:
        OutputLost: when it cannot be written, for example on a full disk.
        BrokenPipeError: when the reader has closed it.
    """
    with _writing():
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def flush() -> None:
    """Flush standard output. Raises the same errors as `print_line`."""
    with _writing():
        sys.stdout.flush()


def exit_code_if_written(code: int, lost: OSError | None) -> int:
    """Return a command's exit code, unless its output could not be written.

    Args:
        code: the exit code.
        lost: the error of an earlier write to standard output; None: all output was written.

    Raises:
        OutputLost: when `lost` is an error.
    """
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
    """Redirect standard output to the null device, so that the flush at exit cannot fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
