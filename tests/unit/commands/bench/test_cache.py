"""`lockstep bench cache`: sessions, disk helpers, ratios, notes and command line."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.commands.bench.cache import (
    benchmark,
    prefix_reuse,
    session_replay,
    spilling_cost,
    transcript,
)
from services.commands.bench.cache.session_replay import TurnResult
from services.commands.bench.cache.testbed import CachePlan, restore_rate
from services.commands.bench.load.load_processes import request_body
from services.commands.bench.measuring import disk, stack
from services.commands.bench.measuring.report import PART, Case, Report, to_text
from shared.clock import ManualClock
from shared.errors import UnavailableError
from tests.unit.commands.bench.bench_arguments import parse
from tests.unit.commands.command_lines import run


def _words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(("turns", "tokens"), [(1, 300), (4, 1_500), (40, 30_000)])
def test_chat_session_grows_with_each_turn_to_requested_number_of_tokens(
    turns: int, tokens: int
) -> None:
    """Each request begins with the messages of the request before it."""
    session = transcript.make_transcript(turns, tokens, seed=3, count=_words)
    assert session.turns == turns
    requests = [session.request(turn) for turn in range(turns)]
    assert requests[-1] == session.messages
    sizes = [sum(_words(one["content"]) for one in request) for request in requests]
    assert sizes[-1] == pytest.approx(tokens, rel=0.05)
    assert sizes == sorted(set(sizes))
    for shorter, longer in itertools.pairwise(requests):
        assert longer[: len(shorter)] == shorter
        assert [one["role"] for one in longer[len(shorter) :]] == ["assistant", "user"]
    growth = [after - before for before, after in itertools.pairwise(sizes)]
    assert all(size == pytest.approx(tokens * 0.85 / turns, rel=0.5) for size in growth)


def _plan(folder: Path, *, repeats: int = 1, is_warm: bool = False) -> CachePlan:
    return CachePlan(
        model=folder, ranks=1, parts=[], prefixes=[], turns=1, tokens=1, repeats=repeats,
        log_folder=folder, is_warm=is_warm,
    )  # fmt: skip


@pytest.mark.parametrize(("is_warm", "says"), [(False, "emptied"), (True, "kept")])
def test_bench_cache_report_says_whether_page_cache_was_emptied(
    tmp_path: Path, *, is_warm: bool, says: str
) -> None:
    """A note says it, because ratios with and without the page cache are not comparable."""
    plan = _plan(tmp_path, is_warm=is_warm)
    report = Report(benchmark="cache", machine={})
    benchmark.describe(plan, tmp_path, report)
    assert says in report.settings["page_cache"]


def test_chat_sessions_are_equal_when_seeds_are_equal_and_otherwise_share_no_prefix() -> None:
    """Sessions with different seeds differ in their second word."""
    one, same, other = (
        transcript.make_transcript(3, 900, seed, _words).messages for seed in (1, 1, 2)
    )
    assert one == same
    assert one[0]["content"].split()[1] != other[0]["content"].split()[1]
    text = "".join(message["content"] for message in one)
    assert text.isascii()
    assert text.count("<tool_call>") == 2


def _clock_of_pauses(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[int], object]
) -> ManualClock:
    """Return a clock that each pause advances; each pause also calls `write` with its number."""
    clock = ManualClock()
    numbers = itertools.count(1)

    def pause(seconds: float) -> None:
        clock.advance(seconds)
        write(next(numbers))

    monkeypatch.setattr(disk, "time", SimpleNamespace(sleep=pause))
    return clock


def test_wait_for_cache_folder_ends_shortly_after_last_file_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait ends when no file has changed for a while, and returns the bytes of all files."""
    (tmp_path / "deep").mkdir()
    written_s: list[float] = []

    def write(number: int) -> None:
        if number % 3 == 0 and len(written_s) < 8:
            (tmp_path / "deep" / str(number)).write_bytes(b"x" * 1_000)
            written_s.append(clock.now())

    clock = _clock_of_pauses(monkeypatch, write)

    assert disk.wait_until_unchanged(tmp_path, clock=clock) == 8_000
    assert disk.UNCHANGED_S <= clock.now() - written_s[-1] < disk.UNCHANGED_S + 0.15


def test_wait_for_cache_folder_times_out_while_its_files_keep_changing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the timeout says that blocks were still being written."""
    clock = _clock_of_pauses(
        monkeypatch, lambda number: (tmp_path / "a").write_bytes(b"x" * number)
    )

    with pytest.raises(UnavailableError, match="still being written after 2 s"):
        disk.wait_until_unchanged(tmp_path, timeout_s=1.7, clock=clock)
    assert 1.7 < clock.now() < 1.9


def test_files_keep_their_content_when_bench_drops_page_cache(tmp_path: Path) -> None:
    """Dropping the page cache changes no file; a read rate is measured unless there is no file."""
    with pytest.raises(UnavailableError, match="no stored blocks"):
        disk.measure_read_rate(tmp_path)
    (tmp_path / "a").write_bytes(bytes(range(256)) * 40_000)
    disk.drop_page_cache(tmp_path)
    assert disk.measure_read_rate(tmp_path) > 0.0
    assert disk.folder_bytes(tmp_path) == 256 * 40_000
    assert (tmp_path / "a").read_bytes() == bytes(range(256)) * 40_000


def test_reported_file_system_type_is_that_of_nearest_mount() -> None:
    """On Linux, /proc is a mount of its own."""
    found = disk.file_system_type(Path("/proc"))
    assert found == "proc" if Path("/proc/mounts").exists() else found


def test_cache_memory_limit_of_bench_fits_one_prefix_but_not_two() -> None:
    """The limit per rank holds the KV of one prefix and not of two."""
    found = prefix_reuse.resident_bytes(2_048 * 1_000, 2_048, length=4_096, ranks=2)
    assert 4_096 * 500 < found < 2 * 4_096 * 500


def _prefix_case(memory: float, ssd: float, restarted: float, peer: float) -> Case:
    case = Case(conditions={PART: "prefixes", "tokens": 1_000})
    for contender, ttft_ms, tier, found in (
        (prefix_reuse.COLD, 2_000.0, "memory_tokens", 0.0),
        (prefix_reuse.MEMORY, 100.0, "memory_tokens", memory),
        (prefix_reuse.SSD, 200.0, "ssd_tokens", ssd),
        (prefix_reuse.RESTARTED, 300.0, "ssd_tokens", restarted),
        (prefix_reuse.PEER_COLD, 1_000.0, "memory_tokens", 0.0),
        (prefix_reuse.PEER_AGAIN, 50.0, "memory_tokens", peer),
    ):
        case.add(contender, {"ttft_ms": ttft_ms, tier: found})
    return case


def test_bench_cache_report_names_prefix_that_server_did_not_find_in_cache() -> None:
    """A note names a prefix without a cache hit, and a server without measurements."""
    assert prefix_reuse.miss_notes(_prefix_case(1_000, 960, 900, 1_000), 1_000) == []
    notes = prefix_reuse.miss_notes(_prefix_case(1_000, 0, 899, 1_000), 1_000)
    assert len(notes) == 2
    assert notes[0].startswith("1000 tokens, ssd: 1 of 1 did not find")
    assert len(prefix_reuse.miss_notes(Case(conditions={}), 1_000)) == 4


def test_cache_hit_times_are_compared_with_cold_request_of_same_repeat() -> None:
    """Restores are compared with plain reads where both have a rate."""
    case = _prefix_case(1_000, 1_000, 1_000, 1_000)
    case.add(prefix_reuse.RESTARTED, {"read_mb_per_s": 700.0})
    case.add(prefix_reuse.PLAIN_READ, {"read_mb_per_s": 1_000.0})
    prefix_reuse.add_ratios(case)
    assert case.ratios["memory/cold ttft_ms"] == [0.05]
    assert case.ratios["ssd, restarted/cold ttft_ms"] == [0.15]
    assert case.ratios["mlx_lm.server again/mlx_lm.server cold ttft_ms"] == [0.05]
    assert case.ratios["ssd, restarted/plain read read_mb_per_s"] == [0.7]
    assert "ssd/plain read read_mb_per_s" not in case.ratios


def test_bench_cache_repeats_long_prefixes_and_sessions_less_than_short_ones(
    tmp_path: Path,
) -> None:
    """Long prefixes and sessions have fewer repeats than short ones, and at least one."""
    one, three, six = (_plan(tmp_path, repeats=repeats) for repeats in (1, 3, 6))
    long = prefix_reuse.LONG_TOKENS
    assert [three.repeats_for(length, long) for length in (1_024, 8_192, 16_384)] == [3, 3, 1]
    assert one.repeats_for(16_384, long) == 1
    long = session_replay.LONG_TOKENS
    assert [six.repeats_for(tokens, long) for tokens in (1_500, 30_000)] == [6, 2]


def test_restore_rate_is_computed_from_scheduler_counters() -> None:
    """The rate is restored bytes by seconds of the scheduler's counters; no restore gives no
    rate."""
    before = {"cache_restore_bytes_total": 10.0, "cache_restore_ms_total": 5.0}
    after = {"cache_restore_bytes_total": 2_010.0, "cache_restore_ms_total": 7.0}
    assert restore_rate(before, after) == pytest.approx(1e6)
    assert restore_rate(after, after) is None
    assert restore_rate({}, {"steps_total": 3.0}) is None


def test_bench_cache_computes_latency_percentiles_over_every_chat_turn() -> None:
    """The metrics of a session cover all turns: percentiles, total time and share of cached
    tokens."""
    turns = [
        TurnResult(ttft_ms=10.0 * n, wall_s=0.5, prompt_tokens=100, found_tokens=50)
        for n in range(1, 21)
    ]
    assert session_replay.session_metrics(turns) == {
        "ttft_p50_ms": 100.0,
        "ttft_p95_ms": 190.0,
        "total_s": 10.0,
        "found_share": 0.5,
    }


def test_bench_cache_report_warns_when_compared_servers_count_different_prompt_lengths() -> None:
    """A note says that the prompts had different lengths, as with another chat template."""
    one, other = TurnResult(1.0, 1.0, 100, 0), TurnResult(1.0, 1.0, 101, 0)
    assert session_replay.prompt_length_notes({"a": [one, one], "b": [one, one]}) == []
    assert session_replay.prompt_length_notes({"a": [one], "b": [other]}) == [
        "Prompts were not equally long; tokens of the last turn: a 100, b 101."
    ]


@pytest.mark.parametrize(
    ("spilling", "resident", "notes"),
    [([5.0, 4.0], [0.0], 0), ([5.0, 0.0], [0.0], 1), ([], [1.0], 2)],
)
def test_bench_cache_report_warns_of_missing_or_unexpected_disk_writes(
    spilling: list[float], resident: list[float], notes: int
) -> None:
    """A note says that the writing server wrote no blocks or that another one wrote some."""
    case = Case(conditions={})
    for contender, values in (
        (spilling_cost.SPILLING, spilling),
        (spilling_cost.RESIDENT, resident),
    ):
        for value in values:
            case.add(contender, {"spilled_mb": value})
    assert len(spilling_cost.spilling_notes(case)) == notes


def test_bench_cache_without_flags_uses_documented_defaults() -> None:
    """Without flags `bench cache` uses its documented defaults; given flags replace them."""
    plain = parse(["cache"])
    assert plain.parts == ["prefixes", "replay", "decode"]
    assert (plain.prefixes, plain.turns, plain.tokens) == ([1_024, 4_096, 16_384], 12, 6_000)
    quick = parse(["cache", "--quick"])
    assert (quick.prefixes, quick.turns, quick.tokens, quick.repeats) == ([1_024], 4, 1_500, 2)
    whole = parse(["cache", "--parts", "replay", "--turns", "40", "--tokens", "30000"])
    assert (whole.parts, whole.turns, whole.tokens) == (["replay"], 40, 30_000)
    assert set(benchmark.PARTS) == {"prefixes", "replay", "decode"}


@pytest.mark.parametrize(
    "argv",
    [
        ["cache", "--parts", "replay,speed"],
        ["cache", "--prefixes", "0"],
        ["cache", "--turns", "x"],
        ["cache", "--directory", "no/such/folder", "--model", "demo"],
    ],
)
def test_bench_cache_exits_with_usage_code_when_command_line_is_wrong(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command line of `bench cache` gives one sentence on standard error."""
    code, _, err = run(capsys, "bench", *argv)
    assert code == 64
    assert err.startswith("lockstep: ")


def test_benchmarked_server_stores_kv_blocks_in_its_own_cache_folder() -> None:
    """No benchmark writes into the user's cache unless a setting names another folder."""
    plain = stack.environment("folder", "model", {})
    assert plain["LOCKSTEP_CACHE_DIRECTORY"] == "folder/blocks"
    named = stack.environment("folder", "model", {"LOCKSTEP_CACHE_DIRECTORY": "other"})
    assert named["LOCKSTEP_CACHE_DIRECTORY"] == "other"


def test_bench_cache_prints_prefixes_and_sessions_in_separate_tables() -> None:
    """The tables of prefixes and sessions have only their own columns."""
    report = Report(benchmark="cache", machine={}, columns=["ttft_ms", "total_s"])
    for part, metric in (("prefixes", "ttft_ms"), ("prefixes", "ttft_ms"), ("replay", "total_s")):
        case = Case(conditions={PART: part})
        case.add("lockstep", {metric: 1.0})
        report.cases.append(case)
    text = to_text(report)
    headers = [line for line in text.splitlines() if line.startswith("| part")]
    assert [("ttft_ms" in line, "total_s" in line) for line in headers] == [
        (True, False),
        (False, True),
    ]


def test_bench_cache_request_has_temperature_zero_and_asks_for_usage() -> None:
    """A request has temperature 0, asks for the usage, and has only the given prompt or
    messages."""
    body = request_body("m", 4, messages=[])
    assert (body["temperature"], body["stream_options"]) == (0, {"include_usage": True})
    assert (body["messages"], "prompt" in body) == ([], False)
