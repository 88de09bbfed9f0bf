"""Deadlines that hold even when the main thread is inside a collective that never returns.

A thread watches steps: MLX releases the GIL while it waits for them. MLX may hold the GIL while it
joins a world (JACCL does), so there `faulthandler` ends the process from C without the GIL.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from shared import limits
from shared.clock import Clock, SystemClock
from shared.log import Log

_log = Log("rank_worker.watchdog")

CHECK_EVERY_S = 0.25
"""Interval of the checks. Checking is cheaper than waking the thread in every step."""


GIL_SLACK_S = 5.0
"""Time for a thread that ends the process itself, before C code ends it without the GIL."""


def write_stacks() -> None:
    """Write the stack of every thread to stderr."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


def _exit_with_traceback(exit_code: int) -> None:
    write_stacks()
    os._exit(exit_code)


class Watchdog:
    """A thread that ends the process when a step takes longer than its plan allows."""

    def __init__(
        self,
        clock: Clock | None = None,
        end_process: Callable[[int], object] = _exit_with_traceback,
    ) -> None:
        self._clock = clock or SystemClock()
        self._end_process = end_process
        self._current: tuple[int, float] | None = None
        """(step id, deadline in clock seconds) of the step that the device computes."""

    def start(self) -> None:
        """Watch from a daemon thread until the process ends."""
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def start_step(self, step_id: int, deadline_s: float) -> None:
        """Watch a step from now on, instead of the step before.

        Args:
            step_id: id of the step.
            deadline_s: seconds from now after which the process is ended.
        """
        self._current = (step_id, self._clock.now() + deadline_s)

    def set_idle(self) -> None:
        """Watch no step until the next `start_step`, because the device has no work."""
        self._current = None

    def check(self) -> None:
        """End the process if the current step has passed its deadline."""
        step = self._current
        if step is None or self._clock.now() < step[1]:
            return
        _log.error("step_deadline_missed", step_id=step[0])
        self._end_process(limits.EXIT_WORLD_LOST)

    def _run(self) -> None:
        while True:
            time.sleep(CHECK_EVERY_S)
            self.check()


@contextlib.contextmanager
def hard_deadline(seconds: float, on_late: Callable[[], object] | None = None) -> Iterator[None]:
    """End the process with code 1 when the `with` block takes longer than `seconds`.

    Works even while the block holds the GIL; stderr then gets the stack of every thread.

    Args:
        seconds: longest time of the block.
        on_late: called in another thread after that time, to say why and to end the process. If it
            cannot run, because the block holds the GIL, the process is ended `GIL_SLACK_S` later.
    """
    timer = None
    end_s = seconds
    if on_late is not None:
        timer = threading.Timer(seconds, on_late)
        timer.daemon = True
        timer.start()
        end_s += GIL_SLACK_S
    faulthandler.dump_traceback_later(end_s, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if timer is not None:
            timer.cancel()
