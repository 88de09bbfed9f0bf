"""`lockstep bench ranks`: figures from a status document, and changes against an earlier run."""

from pathlib import Path
from typing import Any

import pytest

from services.commands.bench.measuring.report import Case, Report, from_json, to_json, to_text
from services.commands.bench.serving import ranks, step_parts
from shared.errors import UsageError
from shared.messages import MeasuredStep, PartTotal, StepProfile
from shared.messages.telemetry.step_profile import Part, Span, pack_spans
from tests.unit.commands.bench.bench_arguments import plan_of


def rank(number: int, **changes: Any) -> dict[str, Any]:
    """Return the object of a rank in a gateway's status."""
    fields = {"rank": number, "memory_bytes": 3 * 2**20, "peak_bytes": 5 * 2**20}
    return {**fields, "shard_bytes": 2**20, **changes}


def measured_step(rows: int, *ranks: dict[Part, float], prefill_tokens: int = 0) -> MeasuredStep:
    """Return a step of which each rank has a profile, with the milliseconds of its parts."""
    profiles = [
        StepProfile(
            rank=number,
            step_id=1,
            began_s=0.0,
            seconds=sum(parts.values()) / 1e3,
            kv_bytes=0,
            parts=[PartTotal(part=part, runs=1, seconds=ms / 1e3) for part, ms in parts.items()],
            spans=pack_spans(Span(part, 0, 0.0, ms / 1e3) for part, ms in parts.items()),
        )
        for number, parts in enumerate(ranks)
    ]
    return MeasuredStep(
        epoch=1,
        step_id=1,
        kind="prefill" if prefill_tokens else "decode",
        prefill_tokens=prefill_tokens,
        decodes=rows,
        profiles=profiles,
    )


def test_bench_ranks_reports_shares_of_parts_and_time_of_waiting_by_rank() -> None:
    """All shares add up to 1. The rank that comes last to a collective waits least."""
    first: dict[Part, float] = {"attention": 2.0, "norms": 1.0, "collective": 3.0}
    second: dict[Part, float] = {"attention": 4.0, "norms": 1.0, "collective": 1.0}
    steps = [measured_step(2, first, second)] * 3
    found = step_parts.rank_metrics(steps)
    assert found[0]["rows"] == 2.0
    assert found[0]["measured_step_ms"] == pytest.approx(6.0)
    assert found[1]["attention_share"] == pytest.approx(4 / 6)
    assert (found[0]["mlp_share"], found[0]["messages_per_step"]) == (None, None)
    for one in found.values():
        shares = [value for name, value in one.items() if name.endswith("_share")]
        assert sum(filter(None, shares)) == pytest.approx(1.0)
        assert one["collectives_per_step"] == 1.0
    assert found[0]["waiting_ms"] == pytest.approx(2.0)
    assert [one["transfer_ms"] for one in found.values()] == pytest.approx([1.0, 1.0])


def test_bench_ranks_reports_messages_of_pipelines_apart_from_collectives() -> None:
    """The shorter of sending and receiving is the transfer."""
    first: dict[Part, float] = {"attention": 2.0, "receive": 2.5, "collective": 0.1}
    second: dict[Part, float] = {"attention": 2.0, "send": 0.4, "collective": 2.2}
    found = step_parts.rank_metrics([measured_step(1, first, second)])
    assert [one["messages_per_step"] for one in found.values()] == [1.0, 1.0]
    assert [one["messages_ms"] for one in found.values()] == pytest.approx([2.5, 0.4])
    assert [one["waiting_ms"] for one in found.values()] == pytest.approx([2.1, 2.1])
    assert [one["transfer_ms"] for one in found.values()] == pytest.approx([0.5, 0.5])


def test_bench_ranks_shows_a_row_per_rank_and_no_exchanges_of_single_rank() -> None:
    """Parts and exchanges have tables of their own, with the clients and the rank as conditions."""
    parts: dict[Part, float] = {"attention": 2.0, "collective": 1.0}
    alone: dict[Part, float] = {"attention": 2.0}
    for ranks_parts in ([parts, parts], [alone]):
        case = Case(conditions={"part": "any", "clients": 4})
        for number, one in step_parts.rank_metrics([measured_step(4, *ranks_parts)]).items():
            case.add(str(number), one)
        found = step_parts.by_rank(case, ("parts", "exchanges"), "lockstep")
        exchanges = [one for one in found if one.conditions["part"] == "exchanges"]
        count = len(ranks_parts)
        assert (len(found) - len(exchanges), len(exchanges)) == (count, count if count > 1 else 0)
        last = [one for one in found if one.conditions["part"] == "parts"][-1]
        assert last.conditions == {"part": "parts", "clients": 4, "rank": count - 1}
        assert last.values("lockstep", "attention_ms") == [2.0]
        assert last.values("lockstep", "waiting_ms") == []


def test_bench_ranks_reports_memory_of_each_rank_in_its_own_row() -> None:
    """Each rank has its memory, its peak, and its weights unless it does not report them."""
    first, second = ranks.memory_cases([rank(0), rank(1, shard_bytes=0)])
    memory = {"memory_mib": [3.0], "peak_mib": [5.0]}
    assert first.series["lockstep"] == {**memory, "weights_mib": [1.0]}
    assert second.series["lockstep"] == memory
    assert second.conditions["rank"] == 1


def report(count: int, tokens_per_s: list[float], clients: int = 1) -> Report:
    """Return the report of a run with one case."""
    case = Case(conditions={"part": "decode", "clients": clients})
    case.series["lockstep"] = {"tokens_per_s": tokens_per_s}
    settings = {"model": "m", "ranks": count}
    return Report(benchmark="ranks", machine={}, settings=settings, cases=[case])


def test_bench_ranks_reports_changes_as_ratios_of_medians_to_earlier_run() -> None:
    """A note names the settings that differ between the runs; JSON keeps the changes."""
    now = report(2, [150.0, 160.0, 170.0])
    ranks.add_changes(now, report(1, [100.0, 80.0, 90.0]))
    kept = from_json(to_json(now))
    assert kept.cases[0].ratios == {"tokens_per_s now/before": [160.0 / 90.0]}
    assert kept.notes == ["now/before compares with an earlier run: ranks 1 to 2."]
    assert "1.78" in to_text(kept)


def test_bench_ranks_reports_no_change_when_earlier_run_lacks_the_metric() -> None:
    """A case that is missing in the earlier run, or was zero there, has no change."""
    now = report(2, [1.0])
    ranks.add_changes(now, report(2, [1.0], clients=4))
    assert now.cases[0].ratios == {}
    ranks.add_changes(now, report(2, [0.0]))
    assert now.cases[0].ratios == {}


def test_bench_ranks_refuses_earlier_run_that_is_unreadable_or_of_another_benchmark(
    tmp_path: Path,
) -> None:
    """A file that is missing, no document, or of another benchmark is refused."""
    file = tmp_path / "before.json"
    assert ranks.read_earlier_run(None) is None
    with pytest.raises(UsageError, match="Cannot read"):
        ranks.read_earlier_run(file)
    file.write_text("{}")
    with pytest.raises(UsageError, match="Not a document"):
        ranks.read_earlier_run(file)
    other = report(1, [1.0])
    other.benchmark = "steps"
    file.write_text(to_json(other))
    with pytest.raises(UsageError, match="is a document of lockstep bench steps, not ranks"):
        ranks.read_earlier_run(file)
    file.write_text(to_json(report(1, [1.0])))
    assert ranks.read_earlier_run(file) is not None


def test_bench_ranks_without_flags_uses_documented_defaults(tmp_path: Path) -> None:
    """Prompts have 1K, 2K and 4K tokens and 1 to 8 clients decode; --quick has fewer of both."""
    plan = _plan(tmp_path)
    assert (plan.prompt_tokens, plan.clients) == ([1_024, 2_048, 4_096], [1, 2, 4, 8])
    assert (plan.ranks, plan.new_tokens) == (2, 128)
    quick = _plan(tmp_path, "--quick")
    assert max(quick.prompt_tokens) < 1_024
    chosen = _plan(tmp_path, "--quick", "--clients", "3", "--prompt-tokens", "9")
    assert (chosen.clients, chosen.prompt_tokens) == ([3], [9])
    changed = _plan(tmp_path, "--set", "cache.enabled=false")
    assert changed.settings == {"LOCKSTEP_CACHE_ENABLED": "false"}


def _plan(logs: Path, *argv: str) -> ranks.RanksPlan:
    plan: ranks.RanksPlan = plan_of(logs, "ranks", "--model", "demo", *argv)
    return plan
