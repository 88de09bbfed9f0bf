"""Watchdog of a rank: step deadlines, and deadlines that hold without the GIL."""

import subprocess
import sys

from services.rank_worker.peers.watchdog import Watchdog, hard_deadline
from shared import limits
from shared.clock import ManualClock
from tests.support.waiting import wait_until


def test_watchdog_ends_no_process_whose_step_meets_deadline() -> None:
    """A step that ends in time, and a long pause after it, do not end the process."""
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


def test_watchdog_ends_process_when_step_passes_plan_deadline() -> None:
    """A step past the deadline of its plan ends the process; the deadline starts with the step."""
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


def test_hard_deadline_ends_process_stuck_with_gil_held() -> None:
    """The hard deadline ends a process inside a C call that holds the GIL, and prints the stack."""
    code = (
        "from services.rank_worker.peers.watchdog import hard_deadline\n"
        "with hard_deadline(0.2):\n"
        "    pow(7, 10**7)\n"
        "    sum(pow(7, 10**7) for _ in range(10**6))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=30, check=False
    )

    assert done.returncode == 1
    assert b"Timeout" in done.stderr


def test_missed_deadline_is_reported_before_process_ends_while_lock_is_free() -> None:
    """A block that lets other threads run gets its sentence said, and no stack without one."""
    said: list[str] = []
    with hard_deadline(0.05, lambda: said.append("late")):
        wait_until(lambda: bool(said), 30.0)
    with hard_deadline(30.0, lambda: said.append("never")):
        pass

    assert said == ["late"]


def test_hard_deadline_has_no_effect_after_its_with_statement() -> None:
    """A hard deadline has no effect after its `with` statement."""
    code = (
        "import time\n"
        "from services.rank_worker.peers.watchdog import hard_deadline\n"
        "with hard_deadline(0.1):\n"
        "    pass\n"
        "time.sleep(0.3)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)
