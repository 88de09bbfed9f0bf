"""Deadlines of a rank: steps, and what holds the GIL."""

import subprocess
import sys

from services.rank_worker.watchdog import Watchdog
from shared import limits
from shared.clock import ManualClock


def test_a_step_in_time_is_left_alone() -> None:
    """A step that ends, and a pause after it, end nothing."""
    clock, ended = ManualClock(), list[int]()
    watchdog = Watchdog(clock, ended.append)
    watchdog.check()
    watchdog.start_step(1, 5.0)
    clock.advance(4.9)
    watchdog.check()
    watchdog.set_idle()
    clock.advance(1_000.0)
    watchdog.check()

    assert ended == []


def test_a_step_past_its_deadline_ends_the_process() -> None:
    """Each step has the time that its own plan gives, from when the device could begin it."""
    clock, ended = ManualClock(), list[int]()
    watchdog = Watchdog(clock, ended.append)
    watchdog.start_step(1, 5.0)
    clock.advance(4.0)
    watchdog.start_step(2, 2.0)
    clock.advance(1.5)
    watchdog.check()
    assert ended == []
    clock.advance(0.5)
    watchdog.check()

    assert ended == [limits.EXIT_WORLD_LOST]


def test_a_hard_deadline_ends_a_process_that_holds_the_gil() -> None:
    """Inside one C call no Python thread runs; the process ends all the same, and says where."""
    code = (
        "from services.rank_worker.watchdog import hard_deadline\n"
        "with hard_deadline(0.2):\n"
        "    pow(7, 10**7)\n"
        "    sum(pow(7, 10**7) for _ in range(10**6))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=30, check=False
    )

    assert done.returncode == 1
    assert b"Timeout" in done.stderr


def test_a_hard_deadline_that_is_met_is_over() -> None:
    """After the block nothing is left that could end the process."""
    code = (
        "import time\n"
        "from services.rank_worker.watchdog import hard_deadline\n"
        "with hard_deadline(0.1):\n"
        "    pass\n"
        "time.sleep(0.3)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)
