"""A pipe from parent to child that closes when the parent dies (macOS has no other way)."""

import os
import threading

from shared import limits

VARIABLE = "LOCKSTEP_LIFELINE_FD"
"""Names the descriptor of the pipe's read end in a child's environment."""


def watch() -> None:
    """Start a thread that ends this process at once when the parent's end of the pipe closes.

    Does nothing when the process was not started with a lifeline.
    """
    number = os.environ.pop(VARIABLE, "")
    if not number.isdigit():
        return
    threading.Thread(target=_wait, args=(int(number),), name="lifeline", daemon=True).start()


def _wait(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1):
            pass
    except OSError:
        pass
    # Nothing can be trusted to unwind: the main thread may be inside a collective that never
    # returns.
    os._exit(limits.EXIT_LIFELINE)
