"""Noticing when other processes use the machine, and measuring again when they do."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from services.commands.bench.measuring import machine
from services.commands.bench.measuring.report import Report
from shared.clock import Clock, SystemClock

T = TypeVar("T")

FOREIGN_CORES_MAX = 0.15
"""Cores that processes of others may use while we measure; a desktop at rest uses less."""

FOREIGN_CORES = "foreign_cores"


def busy_seconds() -> float | None:
    """Return CPU seconds that all processes here have used; None where it is not told."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _wait, interrupts, soft_interrupts = map(int, fields[:7])
    ticks = user + nice + system + interrupts + soft_interrupts
    return ticks / os.sysconf("SC_CLK_TCK")


def measure_with_retries(
    measure: Callable[[], T], tries: int, clock: Clock | None = None
) -> tuple[T, float | None]:
    """Measure; again, at most `tries` times, while others used more than FOREIGN_CORES_MAX.

    What is judged is only what others did, never the result.

    Returns:
        The last measurement, and how many cores others used during it (None: not known).
    """
    clock = clock or SystemClock()
    while True:
        tries -= 1
        began_s, own_s, all_s = clock.now(), _own_seconds(), busy_seconds()
        result = measure()
        ended_all_s = busy_seconds()
        if all_s is None or ended_all_s is None:
            return result, None
        wall_s = clock.now() - began_s
        foreign = max(0.0, (ended_all_s - all_s - (_own_seconds() - own_s)) / wall_s)
        if foreign <= FOREIGN_CORES_MAX or tries <= 0:
            return result, foreign


def add_noise_note(report: Report) -> None:
    """Say in the report how many repeats others disturbed."""
    found = [
        value
        for case in report.cases
        for series in case.series.values()
        for value in series.metrics.get(FOREIGN_CORES, [])
    ]
    disturbed = sum(value > FOREIGN_CORES_MAX for value in found)
    if disturbed:
        report.notes.append(
            f"Other processes used more than {FOREIGN_CORES_MAX} cores during {disturbed} of "
            f"{len(found)} measurements."
        )


def _own_seconds() -> float:
    return sum(machine.cpu_seconds(pid) or 0.0 for pid in machine.descendants(os.getpid()))
