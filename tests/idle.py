"""Runs pytest in the time that others leave: `python -m tests.idle [what pytest takes]`.

For tests that compute and look at no clock, beside tests that wait for clocks and processes. On
Linux whoever wants a core takes it from them at once; elsewhere they are merely the last in line.
"""

import os
import sys

import pytest


def main() -> int:
    """Step back behind everybody else, then run pytest; its workers inherit that."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        os.nice(19)
    return int(pytest.main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
