"""`lockstep bench ranks`: figures from a status document, and changes against an earlier run."""

from pathlib import Path
from typing import Any

import pytest

from services.commands.bench.measuring.report import Case, Report, from_json, to_json, to_text
from services.commands.bench.serving import ranks
from shared.errors import UsageError
from shared.measurements.canary_names import decode_name
from tests.unit.commands.bench.bench_arguments import plan_of


def rank(number: int, milliseconds: float = 1.5, **changes: Any) -> dict[str, Any]:
    """Return the object of a rank in a gateway's status."""
    canary = [
        {"name": "sum of 1 int32", "digest": "", "bytes": 4, "microseconds": 9.0},
        *(
            {
                "name": decode_name(65, rows),
                "digest": "",
                "bytes": 4,
                "microseconds": 1e3 * milliseconds * rows,
            }
            for rows in (1, 2)
        ),
    ]
    fields = {"rank": number, "memory_bytes": 3 * 2**20, "shard_bytes": 2**20, "canary": canary}
    return {**fields, **changes}


def test_collective_time_is_that_of_slowest_rank_for_given_batch_size() -> None:
    """The result is count and milliseconds, or None when no rank timed this number of rows."""
    found = [rank(0), rank(1, 1.75)]
    assert ranks.slowest_collectives(found, 1) == (65, 1.75)
    assert ranks.slowest_collectives(found, 2) == (65, 3.5)
    assert ranks.slowest_collectives(found, 3) is None
    assert ranks.slowest_collectives([rank(0, canary=[])], 1) is None


def test_bench_ranks_reports_fraction_of_step_in_collectives_only_with_canary() -> None:
    """A single rank reports a fraction of 0, and two ranks without a canary report none."""
    client = {"tokens_per_s": 100.0, "itl_p50_ms": 10.0}
    known = ranks.decode_metrics(client, (65, 1.5), is_alone=False)
    assert (known["step_ms"], known["collectives_ms_per_step"]) == (10.0, 1.5)
    assert (known["collectives_per_step"], known["collectives_share"]) == (65, 0.15)
    alone = ranks.decode_metrics(client, None, is_alone=True)
    assert (alone["collectives_per_step"], alone["collectives_share"]) == (0, 0.0)
    unknown = ranks.decode_metrics(client, None, is_alone=False)
    assert (unknown["collectives_per_step"], unknown["collectives_share"]) == (None, None)


def test_bench_ranks_reports_memory_of_each_rank_in_its_own_row() -> None:
    """Each rank has its memory and its weights, unless it does not report the weights."""
    first, second = ranks.memory_cases([rank(0), rank(1, shard_bytes=0)])
    assert first.series["lockstep"] == {"memory_mib": [3.0], "weights_mib": [1.0]}
    assert second.series["lockstep"] == {"memory_mib": [3.0]}
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
