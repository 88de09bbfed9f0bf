"""Runs pytest in the time that others leave: `python -m tests.idle [what pytest takes]`.

For tests that compute, beside tests that wait for clocks and processes. On Linux whoever wants a
core takes it from them at once; elsewhere they are merely the last in line.
"""

import contextlib
import os
import sys
from pathlib import Path

import pytest


def main() -> int:
    """Step back behind everybody else, then run pytest; its workers inherit that."""
    # A group of processes of its own: whoever started this ends the workers with it. Started by
    # hand it has one already.
    with contextlib.suppress(OSError):
        os.setsid()
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        # Where sessions share the cores evenly, what a process is counts only within its own.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text("19")
    else:
        os.nice(19)
    return int(pytest.main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
