"""Disturbed measurements are repeated for what others did, never for what they showed."""

import pytest

from services.commands.bench.measuring import noise
from services.commands.bench.measuring.report import Case, Report


class _Seconds:
    """A clock on which each look is one second after the last."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        self._now_s += 1.0
        return self._now_s


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Cores that others use during each measurement; each takes one second."""
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


def test_a_calm_measurement_is_taken_once(others: list[float]) -> None:
    """Whatever it shows."""
    others += [0.1]
    results = iter(["bad"])
    result, foreign = noise.measure_with_retries(lambda: next(results), 5, _Seconds())
    assert result == "bad"
    assert foreign == pytest.approx(0.1)


def test_a_disturbed_one_is_taken_again_a_bounded_number_of_times(others: list[float]) -> None:
    """The last one counts, with what others used during it."""
    others += [1.0, 1.2, 0.05]
    result, foreign = noise.measure_with_retries(iter("abc").__next__, 5, _Seconds())
    assert result == "c"
    assert foreign == pytest.approx(0.05)
    others += [1.0, 1.2]
    result, foreign = noise.measure_with_retries(iter("abc").__next__, 2, _Seconds())
    assert result == "b"
    assert foreign == pytest.approx(1.2)


def test_where_the_system_tells_nothing_once_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """No guess takes the place of a reading."""
    monkeypatch.setattr(noise, "busy_seconds", lambda: None)
    assert noise.measure_with_retries(iter("ab").__next__, 5) == ("a", None)


def test_the_report_says_how_many_repeats_were_disturbed() -> None:
    """And says nothing when none was."""
    case = Case(conditions={})
    for foreign in (0.0, 0.5, None):
        case.series_of("lockstep").add({"tokens_per_s": 1.0, noise.FOREIGN_CORES: foreign})
    report = Report(benchmark="overhead", machine={}, settings={}, cases=[case])
    noise.add_noise_note(report)
    assert report.notes == ["Other processes used more than 0.15 cores during 1 of 2 measurements."]
    quiet = Report(benchmark="overhead", machine={}, settings={})
    noise.add_noise_note(quiet)
    assert quiet.notes == []
