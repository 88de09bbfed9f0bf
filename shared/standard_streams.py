"""Standard streams of a process that was started with some of them closed (`>&-`, some launchers).

The next file or pipe that is opened gets the free number, and a child takes it for its output.
"""

import os
import sys
from pathlib import Path


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
