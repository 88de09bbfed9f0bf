"""The benchmarks' command line, step metrics, shared files and counting in cut streams."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.commands.bench import flags, main
from services.commands.bench.benchmarks import BENCHMARKS
from services.commands.bench.fake_ranks.sleeping_rank import StepTimesFile
from services.commands.bench.load.counting_client import MarkCounter, SharedCounter
from services.commands.bench.measuring import stack
from services.commands.bench.measuring.plan import BenchmarkPlan
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.parts import steps
from services.commands.bench.plans import Benchmark
from shared.errors import UnavailableError, UsageError
from shared.model.location import demo_folder
from shared.os import standard_streams
from tests.unit.commands.bench.bench_arguments import parse, plan_of
from tests.unit.commands.command_lines import run


def test_benchmark_command_without_flags_uses_documented_defaults() -> None:
    """Without flags a benchmark runs its documented cases; given flags replace the defaults."""
    overhead = parse(["overhead"])
    assert (overhead.clients, overhead.prompt_tokens) == ([1, 4, 8, 16], [64, 1_024])
    assert overhead.new_tokens == 64
    assert parse(["steps"]).step_ms == [2.0, 10.0]
    assert parse(["gateway"]).streams == [16, 64]
    assert parse(["peers", "--clients", "2,3"]).clients == [2, 3]


def test_quick_flag_reduces_cases_and_repeats_of_benchmark() -> None:
    """`--quick` reduces cases and repeats; a smaller given number of repeats stays."""
    quick = parse(["overhead", "--quick"])
    assert (quick.clients, quick.prompt_tokens, quick.repeats) == ([1, 16], [64], 2)
    assert parse(["steps", "--quick", "--repeats", "1"]).repeats == 1


def _defaulted(benchmark: Benchmark) -> set[str]:
    """Return the flags with another default or a limit under `--quick`."""
    options = [one for one in benchmark.options if isinstance(one, flags.BenchmarkOption)]
    return {str(one.name) for one in options if (one.quick, one.quick_max) != (None, None)}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_bench_help_shows_summary_and_flags_of_each_benchmark(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list and the benchmark's own help show its summary; its help has every defaulted flag."""
    benchmark = BENCHMARKS[name]
    helps = []
    for words in (["--help"], [name, "--help"]):
        code, out, _ = run(capsys, "bench", *words)
        assert code == 0
        helps.append(" ".join(out.split()))
    # A line may end after any hyphen.
    summary = benchmark.summary.replace(" ", "")
    assert all(summary in text.replace(" ", "") for text in helps)
    for flag in {*_defaulted(benchmark), "json", "repeats", "logs"}:
        assert f"--{flag.replace('_', '-')} " in f"{helps[1]} ".replace("]", " ")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_quick_flag_gives_no_benchmark_more_cases_or_repeats_than_default(name: str) -> None:
    """With `--quick` a benchmark has at most two repeats and no more cases than without."""
    benchmark, plain, quick = (
        BENCHMARKS[name],
        vars(parse([name])),
        vars(parse([name, "--quick"])),
    )
    assert plain["repeats"] == benchmark.repeats
    assert quick["repeats"] <= 2
    for flag in _defaulted(benchmark):
        small, whole = (
            len(one) if isinstance(one, list) else one for one in (quick[flag], plain[flag])
        )
        assert 0 < small <= whole


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["speed"],
        ["overhead", "--repeats", "0"],
        ["overhead", "--clients", "1,x"],
        ["overhead", "--preset", "7b"],
        ["overhead", "--preset", "tiny", "--model", "demo"],
        ["steps", "--step-ms", "0"],
    ],
)
def test_bench_exits_with_usage_code_when_command_line_is_wrong(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command line gives one sentence on standard error and nothing on standard output."""
    code, out, err = run(capsys, "bench", *argv)
    assert (code, out) == (64, "")
    assert err.startswith("lockstep: ")
    assert err.count("\n") == 1


def test_bench_set_flag_becomes_environment_variable_of_that_setting() -> None:
    """`--set SECTION.KEY=VALUE` becomes a variable; a setting without a section is refused."""
    assert flags._setting("scheduler.decode_stall_ms=50") == (
        "LOCKSTEP_SCHEDULER_DECODE_STALL_MS",
        "50",
    )
    with pytest.raises(UsageError, match=r"SECTION\.KEY=VALUE"):
        flags._setting("decode_stall_ms=50")


def test_bench_steps_divides_time_counters_into_microseconds_per_step() -> None:
    """Sums of milliseconds are divided by the steps; no step gives no metrics."""
    before = {"steps_total": 10.0, "x_ms_total": 5.0}
    after = {"steps_total": 20.0, "x_ms_total": 6.0, "other": 3.0}
    found = stack.per_step_metrics(before, after)
    assert found == {"steps": 10.0, "x_us_per_step": 100.0}
    assert stack.per_step_metrics(after, after) == {}


def test_bench_steps_counts_gaps_only_between_consecutive_steps_with_full_batch() -> None:
    """Gaps beside smaller steps do not count, and a sleep that takes too long is no gap."""
    times = []
    now_s = 0.0
    for number in range(40):
        decodes = 3 if number < 5 else 16
        times.append((now_s, now_s + 0.0021, decodes))
        now_s += 0.0021 + (0.5 if number < 5 else 0.00003)
    found = steps.step_metrics(times, 16, 2.0)
    assert found["exposed_us_p50"] == pytest.approx(30.0)
    assert found["exposed_us_p99"] == pytest.approx(30.0)
    assert found["overshoot_us_p50"] == pytest.approx(100.0)
    assert found["period_us_p50"] == pytest.approx(2_130.0)
    with pytest.raises(UnavailableError, match="decoded all 17"):
        steps.step_metrics(times, 17, 2.0)


def test_step_times_recorded_by_one_process_are_read_by_another(tmp_path: Path) -> None:
    """One process reads the step times of another; a new pace deletes the recorded steps."""
    one, other = StepTimesFile(tmp_path / "times"), StepTimesFile(tmp_path / "times")
    one.set_pace(0.002, spins=True, queued=False)
    assert other.pace() == (0.002, True, False)
    other.record(1.0, 2.0, 16)
    other.record(3.0, 4.0, 15)
    assert one.steps() == [(1.0, 2.0, 16), (3.0, 4.0, 15)]
    one.set_pace(0.01, spins=False, queued=True)
    assert other.pace() == (0.01, False, True)
    assert other.steps() == []
    progress = SharedCounter(tmp_path / "progress")
    progress.set(7)
    assert SharedCounter(tmp_path / "progress").get() == 7


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_byte_pattern_is_counted_once_wherever_reads_cut_the_stream(size: int) -> None:
    """A pattern counts once, also when it spans two reads."""
    data = b"data: {z} data: {zz}" * 7
    for mark, expected in ((b"data: ", 14), (b"z", 21)):
        counter = MarkCounter(mark)
        found = sum(counter.feed(data[start : start + size]) for start in range(0, len(data), size))
        assert found == counter.count == expected


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_command_line_sets_model_tries_and_quick_repeats_of_each_benchmark(
    tmp_path: Path, name: str, quick: list[str]
) -> None:
    """The model, the tries and the log folder are those of the command line; `--quick` takes two
    repeats."""
    has_model = any(option.name == "model" for option in BENCHMARKS[name].options)
    given = ["--model", "demo"] if has_model else []
    plan = plan_of(tmp_path, name, *given, *quick, "--tries", "3")
    if has_model:
        assert plan.model == demo_folder().resolve()
    assert isinstance(plan, BENCHMARKS[name].plan)
    assert (plan.log_folder, plan.tries) == (tmp_path, 3)
    assert plan.repeats == (2 if quick else BENCHMARKS[name].repeats)


def _make_benchmark(measure: Callable[[Any, Report], None]) -> Benchmark:
    return Benchmark(
        name="example",
        summary="an example",
        repeats=1,
        options=[],
        plan=BenchmarkPlan,
        measure=measure,
        columns=[],
    )


@pytest.mark.parametrize("is_measured", [True, False])
def test_benchmark_ended_early_prints_its_figures_so_far(
    is_measured: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """It ends as a signal ends it, after a report with a note, if there is anything to report."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def measure(_plan: object, report: Report) -> None:
        case = Case(conditions={"batch": 4})
        report.cases.append(case)
        if is_measured:
            case.add("lockstep", {"step_ms": 7.5})
        raise SystemExit(143)

    with pytest.raises(SystemExit, match="143"):
        main.run(_make_benchmark(measure), logs=tmp_path, as_json=False, repeats=1, tries=0)
    out = capsys.readouterr().out
    assert ("| 4     | lockstep  | 7.50 [7.50-7.50] |" in out) == is_measured
    assert ("ended early" in out) == is_measured


def test_error_that_ends_benchmark_early_counts_if_report_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A reader that has ended, as after Ctrl-C in a pipeline, does not hide the error."""

    def measure(_plan: object, report: Report) -> None:
        report.cases.append(Case(conditions={}, series={"lockstep": {"step_ms": [7.5]}}))
        raise UnavailableError("A rank has ended.")

    def lose(_text: str) -> None:
        raise BrokenPipeError

    discarded: list[bool] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(standard_streams, "print_line", lose)
    monkeypatch.setattr(standard_streams, "discard_output", lambda: discarded.append(True))
    with pytest.raises(UnavailableError, match="rank has ended"):
        main.run(_make_benchmark(measure), logs=tmp_path, as_json=True, repeats=1, tries=0)
    # Else Python would fail to flush the rest at its exit.
    assert discarded
