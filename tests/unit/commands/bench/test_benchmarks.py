"""The command line, what is read out of counters and step times, and counting in cut streams."""

from pathlib import Path

import pytest

from services.commands.bench import flags, main
from services.commands.bench.benchmarks import BENCHMARKS
from services.commands.bench.fake_ranks.sleeping_rank import StepTimesFile
from services.commands.bench.load.counting_client import MarkCounter, SharedCounter
from services.commands.bench.measuring import stack
from services.commands.bench.measuring.numbers import latencies
from services.commands.bench.parts import steps
from shared.errors import UnavailableError, UsageError


def test_defaults_of_each_benchmark() -> None:
    """The cases of the documentation are what runs without flags."""
    overhead = main.parse(["overhead"])
    assert (overhead.clients, overhead.prompt_tokens) == ([1, 4, 8, 16], [64, 1_024])
    assert overhead.new_tokens == 64
    assert main.parse(["steps"]).step_ms == [2.0, 10.0]
    assert main.parse(["gateway"]).streams == [16, 64]
    assert main.parse(["peers", "--clients", "2,3"]).clients == [2, 3]


def test_quick_means_less() -> None:
    """Fewer cases and repeats, whatever the benchmark."""
    quick = main.parse(["overhead", "--quick"])
    assert (quick.clients, quick.prompt_tokens, quick.repeats) == ([1, 16], [64], 2)
    assert main.parse(["steps", "--quick", "--repeats", "1"]).repeats == 1


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_benchmark_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is in the list; its own help says what it measures and names every flag it fills in."""
    row = BENCHMARKS[name]
    said = []
    for argv in (["--help"], [name, "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main.run(argv)
        said.append(" ".join(capsys.readouterr().out.split()))
    assert all(row.summary in text for text in said)
    for filled in {*row.usual, *row.quick, *row.quick_most, "json", "repeats", "logs"}:
        assert f"--{filled.replace('_', '-')} " in f"{said[1]} ".replace("]", " ")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_smoke_tests_are_smaller(name: str) -> None:
    """Nothing is left open without flags; --quick repeats at most twice and has no more cases."""
    row, plain, quick = (
        BENCHMARKS[name],
        vars(main.parse([name])),
        vars(main.parse([name, "--quick"])),
    )
    assert plain["repeats"] == row.repeats
    assert quick["repeats"] <= 2
    for filled in {*row.usual, *row.quick, *row.quick_most}:
        small, whole = (
            one if isinstance(one, int) else len(one) for one in (quick[filled], plain[filled])
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
def test_a_wrong_command_line_is_refused(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence on standard error, nothing on standard output, the usage exit code."""
    assert main.run(argv) == 64
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("lockstep bench: ")
    assert "Traceback" not in said.err


def test_settings_become_environment_variables() -> None:
    """--set section.key=value reaches the stack as its variable."""
    assert flags._setting("scheduler.decode_stall_ms=50") == (
        "LOCKSTEP_SCHEDULER_DECODE_STALL_MS",
        "50",
    )
    with pytest.raises(UsageError, match=r"SECTION\.KEY=VALUE"):
        flags._setting("decode_stall_ms=50")


def test_counters_are_found_and_divided_by_steps() -> None:
    """However deep the status nests them; milliseconds become microseconds per step."""
    before = stack.find_counters({"scheduler": {"counters": {"steps_total": 10, "x_ms_total": 5}}})
    after = {"steps_total": 20.0, "x_ms_total": 6.0, "y_seconds_total": 0.001, "other": 3.0}
    found = stack.per_step_metrics(before, after)
    assert found == {"steps": 10.0, "x_us_per_step": 100.0, "y_us_per_step": 100.0}
    assert stack.per_step_metrics(after, after) == {}
    assert stack.find_counters({"ready": True}) == {}


def test_exposed_time_is_the_gap_between_full_steps() -> None:
    """Gaps beside steps with fewer sequences do not count, nor does a sleep that took too long."""
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


def test_times_are_shared_through_the_file(tmp_path: Path) -> None:
    """What one process records, the other reads; setting a pace forgets what was before."""
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
def test_marks_are_counted_wherever_the_stream_is_cut(size: int) -> None:
    """A mark that spans two reads counts once."""
    data = b"data: {z} data: {zz}" * 7
    for mark, expected in ((b"data: ", 14), (b"z", 21)):
        counter = MarkCounter(mark)
        found = sum(counter.feed(data[start : start + size]) for start in range(0, len(data), size))
        assert found == counter.count == expected


def test_latencies_are_of_all_requests() -> None:
    """First tokens count from when each request was sent; gaps within a request only."""
    found = latencies([(0.0, [1.0, 1.5]), (1.0, [1.25, 1.5]), (2.0, [])], wall_s=2.0)
    assert found["ttft_p50_ms"] == 250.0
    assert found["ttft_p95_ms"] == 1_000.0
    assert found["itl_p95_ms"] == 500.0
    assert found["decode_tokens_per_s"] == pytest.approx(2 / 0.75)
    assert "itl_p50_ms" not in latencies([(0.0, [1.0])], wall_s=1.0)
