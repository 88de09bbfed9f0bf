"""Noise from other processes. Owns its detection and the repetition of disturbed measurements."""

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import psutil

from services.commands.bench.measuring import machine
from services.commands.bench.measuring.plan import BenchmarkPlan
from services.commands.bench.measuring.processes import print_progress
from services.commands.bench.measuring.report import Case, Report
from shared.clock import Clock, SystemClock

T = TypeVar("T")
Measured = Mapping[str, Mapping[str, float | None]]
"""Contender -> metric -> value of one repeat; None: the metric could not be measured."""

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


def add_repeat(
    case: Case, tries: int, measure: Callable[[], Measured], noted: Collection[str] = ()
) -> None:
    """Measure all contenders once and add their metrics and the foreign cores to the case.

    Args:
        case: conditions of the measurement; receives one value per contender and metric.
        tries: largest number of measurements while other processes disturb them.
        measure: measures all contenders in turn; returns contender -> metric -> value.
        noted: contenders that get the metric of foreign cores; empty: all.
    """
    found, foreign_cores = measure_with_retries(measure, tries)
    for contender, metrics in found.items():
        case.add(contender, metrics)
        if not noted or contender in noted:
            case.add(contender, {FOREIGN_CORES: foreign_cores})


def measure_case(
    plan: BenchmarkPlan,
    report: Report,
    conditions: Mapping[str, Any],
    measure: Callable[[], Measured],
    *,
    warm_up: Callable[[], object] | None = None,
    noted: Collection[str] = (),
    repeats: int | None = None,
) -> Case:
    """Measure all contenders in turn, repeat by repeat; add the case to the report and return it.

    The report has the case from the beginning: a benchmark may be ended early.

    Args:
        plan: its numbers of repeats and tries.
        report: receives the case.
        conditions: name -> number or text, as in Case; also label the lines about the progress.
        measure: as for `add_repeat`; is called once per repeat or more often.
        warm_up: is called first, and its result is not used; None: no warm-up.
        noted: as for `add_repeat`.
        repeats: number of repeats; None: that of the plan.
    """
    case = Case(conditions=dict(conditions))
    report.cases.append(case)
    label = ", ".join(f"{name} {value}" for name, value in conditions.items())
    if warm_up is not None:
        print_progress(f"{label}, warm-up")
        warm_up()
    for repeat in range(plan.repeats if repeats is None else repeats):
        print_progress(f"{label}, repeat {repeat + 1}")
        add_repeat(case, plan.tries, measure, noted)
    return case


def add_noise_note(report: Report) -> None:
    """Add a note if other processes used over FOREIGN_CORES_MAX cores in any measurement."""
    found = [
        value
        for case in report.cases
        for metrics in case.series.values()
        for value in metrics.get(FOREIGN_CORES, [])
    ]
    disturbed = sum(value > FOREIGN_CORES_MAX for value in found)
    if disturbed:
        report.notes.append(
            f"Other processes used more than {FOREIGN_CORES_MAX} cores during {disturbed} of "
            f"{len(found)} measurements."
        )


def _own_seconds() -> float:
    return sum(map(machine.cpu_seconds, machine.process_tree(os.getpid())))
