"""Pytest at idle priority: `python -m tests.support.idle [arguments of pytest]`.

Used for tests that compute while other tests wait for clocks and processes. On Linux every other
process takes precedence (SCHED_IDLE); elsewhere the niceness is raised to the maximum.
"""

import contextlib
import os
import sys
from pathlib import Path

import pytest


def main() -> int:
    """Lower the priority of this process, then run pytest; its workers inherit the priority.

    Returns:
        The exit code of pytest.
    """
    # A process group of its own, so that the caller can end the workers together with this process.
    # A process that a shell has started by hand already leads a group; setsid fails then.
    with contextlib.suppress(OSError):
        os.setsid()
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        # Where Linux groups processes by session, a priority counts within its own session only.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text("19")
    else:
        os.nice(19)
    return int(pytest.main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
