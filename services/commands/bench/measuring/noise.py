"""Noise from other processes. Owns its detection and the repetition of disturbed measurements."""

import os
from collections.abc import Callable
from typing import TypeVar

import psutil

from services.commands.bench.measuring import machine
from services.commands.bench.measuring.report import Report
from shared.clock import Clock, SystemClock

T = TypeVar("T")

FOREIGN_CORES_MAX = 0.15
"""Cores that other processes may use during a measurement; an idle desktop uses fewer."""

FOREIGN_CORES = "foreign_cores"
"""Name of the metric: cores that other processes used during a measurement."""


def busy_seconds() -> float | None:
    """Return the CPU seconds used on this machine since its start; None when unknown."""
    try:
        times = psutil.cpu_times()
    except (OSError, psutil.Error):
        return None
    interrupts_s: float = getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    seconds: float = times.user + times.nice + times.system + interrupts_s
    return seconds


def measure_with_retries(
    measure: Callable[[], T], tries: int, clock: Clock | None = None
) -> tuple[T, float | None]:
    """Call `measure`, and call it again while other processes disturbed it, up to `tries` times.

    A measurement was disturbed if processes other than this one and its descendants used more than
    FOREIGN_CORES_MAX cores during it. Its result is not considered.

    Args:
        measure: takes one measurement and returns its result.
        tries: largest number of measurements.
        clock: source of the time; None: the system's.

    Returns:
        The last result, and the mean number of cores that other processes used during that
        measurement (None: unknown).
    """
    clock = clock or SystemClock()
    while True:
        tries -= 1
        began_s, own_before_s, all_before_s = clock.now(), _own_seconds(), busy_seconds()
        result = measure()
        all_after_s = busy_seconds()
        if all_before_s is None or all_after_s is None:
            return result, None
        wall_s = clock.now() - began_s
        own_s = _own_seconds() - own_before_s
        foreign_cores = max(0.0, (all_after_s - all_before_s - own_s) / wall_s)
        if foreign_cores <= FOREIGN_CORES_MAX or tries <= 0:
            return result, foreign_cores


def add_noise_note(report: Report) -> None:
    """Add a note if other processes used over FOREIGN_CORES_MAX cores in any measurement."""
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
    return sum(machine.cpu_seconds(pid) or 0.0 for pid in machine.process_tree(os.getpid()))
