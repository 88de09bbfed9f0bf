"""Deadlines that hold although the main thread is inside a collective that never returns.

Two kinds. A thread of ours watches steps: MLX releases the GIL while it waits. While the world is
being joined it may not (JACCL's init holds it), so there C code without the GIL ends the process.
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
"""How late an expired step is noticed at most. Looking is cheaper than a wake-up each step."""


def _end_process(exit_code: int) -> None:
    """End, and leave behind what every thread was doing."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    os._exit(exit_code)


class Watchdog:
    """Ends the process when a step makes no progress for as long as its plan allows."""

    def __init__(
        self, clock: Clock | None = None, end: Callable[[int], object] = _end_process
    ) -> None:
        self._clock = clock or SystemClock()
        self._end = end
        self._step: tuple[int, float] | None = None
        """(step id, monotonic second of its end) of the step that the device works on."""

    def start(self) -> None:
        """Watch from a thread of its own until the process ends."""
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def begin(self, step_id: int, deadline_s: float) -> None:
        """Say that the device now works on this step and may take `deadline_s`."""
        self._step = (step_id, self._clock.now() + deadline_s)

    def rest(self) -> None:
        """Say that the device has nothing to do."""
        self._step = None

    def check(self) -> None:
        """End the process if the step's time is over."""
        step = self._step
        if step is None or self._clock.now() < step[1]:
            return
        _log.error("step_deadline_missed", step_id=step[0])
        self._end(limits.EXIT_WORLD_LOST)

    def _run(self) -> None:
        while True:
            time.sleep(CHECK_EVERY_S)
            self.check()


@contextlib.contextmanager
def hard_deadline(seconds: float) -> Iterator[None]:
    """End the process with code 1 when the block takes longer, even if it holds the GIL."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
