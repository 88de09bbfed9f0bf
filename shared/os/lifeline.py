"""Pipe from parent to child that closes when the parent dies. Owns ending the orphaned child.

A pipe works on macOS too, which has no signal for the parent's death.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator

from shared import limits

VARIABLE = "LOCKSTEP_LIFELINE_FD"
"""Environment variable with the descriptor of the pipe's read end."""

_TURN = b"t"
"""What a parent writes into the lifeline of a spare process, once."""

_is_watched = threading.Event()
"""Set if this process was started with a lifeline."""

_has_turn = threading.Event()
"""Set when the parent has given this process its turn."""

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl(2)."""


def exit_with_parent() -> None:
    """Start a thread that ends this process at once when its parent process dies.

    The thread reads a pipe (the lifeline) whose other end only the parent holds. Does nothing in a
    process that was started without a lifeline.
    """
    number = os.environ.pop(VARIABLE, "")
    if not number.isdigit():
        return
    _is_watched.set()
    threading.Thread(target=_wait, args=(int(number),), name="lifeline", daemon=True).start()


def is_held() -> bool:
    """Return whether this process was started with a lifeline, by a parent that ends it."""
    return _is_watched.is_set() or VARIABLE in os.environ


def wait_for_turn() -> None:
    """Wait until the parent calls `give_turn`; without a lifeline, for ever."""
    _has_turn.wait()


def give_turn(write_end: int) -> None:
    """Tell a child process that waits in `wait_for_turn` to go on.

    Args:
        write_end: descriptor of the parent's end of the child's lifeline.

    Raises:
        BrokenPipeError: when the child has ended.
    """
    os.write(write_end, _TURN)


@contextlib.contextmanager
def killed_with_parent() -> Iterator[None]:
    """Have the kernel kill this process if its parent dies inside the `with` block.

    For blocks in which C code holds the GIL, so that the thread of `exit_with_parent` cannot run.
    Call it in the main thread. Does nothing outside Linux and in processes without a lifeline.
    """
    if sys.platform != "linux" or not _is_watched.is_set():
        yield
        return
    _die_with_parent(signal.SIGKILL)
    try:
        yield
    finally:
        _die_with_parent(0)


def _die_with_parent(number: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, number, 0, 0, 0)


def _wait(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1):
            _has_turn.set()
    except OSError:
        pass
    # An orderly exit may hang: the main thread may be inside a collective that never returns.
    os._exit(limits.EXIT_LIFELINE)
