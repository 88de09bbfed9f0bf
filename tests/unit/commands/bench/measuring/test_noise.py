"""Measurements that other processes disturbed are repeated; their results do not matter."""

import pytest

from services.commands.bench.measuring import noise
from services.commands.bench.measuring.report import Case, Report


class _Seconds:
    """Clock that advances by one second per call."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        self._now_s += 1.0
        return self._now_s


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Cores that other processes use during each measurement of one second."""
    cores: list[float] = []
    used = {"all": 0.0, "reads": 0}

    def busy() -> float:
        if used["reads"] % 2:
            used["all"] += cores.pop(0)
        used["reads"] += 1
        return used["all"]

    monkeypatch.setattr(noise, "busy_seconds", busy)
    monkeypatch.setattr(noise, "_own_seconds", lambda: 0.0)
    return cores


def test_measurement_is_taken_once_when_no_other_process_uses_cpu(others: list[float]) -> None:
    """A measurement without disturbance is not repeated, however bad its result."""
    others += [0.1]
    results = iter(["bad"])
    result, foreign = noise.measure_with_retries(lambda: next(results), 5, _Seconds())
    assert result == "bad"
    assert foreign == pytest.approx(0.1)


def test_measurement_is_repeated_up_to_limit_while_other_processes_use_cpu(
    others: list[float],
) -> None:
    """The last measurement counts, with the cores that others used during it."""
    others += [1.0, 1.2, 0.05]
    result, foreign = noise.measure_with_retries(iter("abc").__next__, 5, _Seconds())
    assert result == "c"
    assert foreign == pytest.approx(0.05)
    others += [1.0, 1.2]
    result, foreign = noise.measure_with_retries(iter("abc").__next__, 2, _Seconds())
    assert result == "b"
    assert foreign == pytest.approx(1.2)


def test_measurement_is_taken_once_when_cpu_use_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU use of other processes cannot be read, a measurement is not repeated."""
    monkeypatch.setattr(noise, "busy_seconds", lambda: None)
    assert noise.measure_with_retries(iter("ab").__next__, 5) == ("a", None)


def test_bench_report_notes_how_many_repeats_other_processes_disturbed() -> None:
    """A note has the number of disturbed repeats; without any there is no note."""
    case = Case(conditions={})
    for foreign in (0.0, 0.5, None):
        case.add("lockstep", {"tokens_per_s": 1.0, noise.FOREIGN_CORES: foreign})
    report = Report(benchmark="overhead", machine={}, settings={}, cases=[case])
    noise.add_noise_note(report)
    assert report.notes == ["Other processes used more than 0.15 cores during 1 of 2 measurements."]
    quiet = Report(benchmark="overhead", machine={}, settings={})
    noise.add_noise_note(quiet)
    assert quiet.notes == []
