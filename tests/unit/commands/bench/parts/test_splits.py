"""`lockstep bench splits`: its command line, metrics and contenders that do not start."""

import sys
from pathlib import Path
from typing import Any

import pytest

from services.commands.bench.measuring.report import PART, Case, Report
from services.commands.bench.parts import splits
from services.commands.bench.random_model import PRESETS, _layer_shapes
from shared.errors import UsageError
from tests.unit.commands.bench.bench_arguments import plan_of


def _plan(tmp_path: Path, *argv: str) -> splits.SplitsPlan:
    plan: splits.SplitsPlan = plan_of(tmp_path, "splits", "--model", "demo", *argv)
    return plan


def test_bench_splits_without_flags_uses_documented_defaults(tmp_path: Path) -> None:
    """Two ranks run all splits with batches of 1, 8 and 32 and prompts of 256 and 2,048 tokens."""
    plan = _plan(tmp_path, "--backend", "ring")
    assert (plan.ranks, plan.batches, plan.prefills) == (2, [1, 8, 32], [256, 2_048])
    assert plan.splittings == ["one", "tensor", "expert", "tensor+expert", "pipeline"]
    quick = _plan(tmp_path, "--quick", "--splittings", "one,expert", "--ranks", "4")
    assert (quick.ranks, quick.splittings, quick.prefills) == (4, ["one", "expert"], [256])


@pytest.mark.parametrize(
    "argv", [["--splittings", "expert,data"], ["--backend", "mpi"], ["--ranks", "1"]]
)
def test_bench_splits_refuses_wrong_command_line_before_any_process_starts(
    tmp_path: Path, argv: list[str]
) -> None:
    """The error is raised before any process starts."""
    with pytest.raises(UsageError):
        _plan(tmp_path, *argv)


def test_bench_splits_reports_step_time_of_slowest_rank() -> None:
    """Each part has its largest value and the value of every rank."""
    found: list[dict[str, Any]] = [
        {"step_ms": 4.0, "compute_ms": 3.0, "collectives_ms": 0.5, "waiting_ms": 0.5},
        {"step_ms": 5.0, "compute_ms": 2.0, "collectives_ms": 0.6, "waiting_ms": 2.4},
    ]
    for one in found:
        one["collectives"] = 9.0
    # Two layers, in which both ranks route 100 tokens; the busiest rank has 60 and 90 of them.
    found[0]["assignments"] = [60, 10], [100, 100]
    found[1]["assignments"] = [40, 90], [100, 100]
    about = [{"weights_mib": 10.0}, {"weights_mib": 12.0}]
    figures = splits._metrics({"phase": "decode", "batch": 8}, found, about)
    assert figures["step_ms"] == 5.0
    assert figures["tokens_per_s"] == 1_600.0
    assert (figures["compute_ms_most"], figures["compute_ms_rank_1"]) == (3.0, 2.0)
    assert figures["waiting_ms_most"] == 2.4
    assert figures["weights_mib_most"] == 12.0
    assert figures["imbalance"] == pytest.approx((60 + 90) / (50 + 50))
    assert figures["foreign_share_rank_0"] == pytest.approx(0.65)
    assert figures["foreign_share_most"] == pytest.approx(0.65)
    assert set(splits.COLUMNS) <= set(figures)


@pytest.mark.parametrize(
    "assignments",
    [[([], [])] * 2, [([5, 5], [5, 5])] * 2, [([5], [5]), ([5, 5], [5, 5])]],
    ids=["dense", "tensor", "pipeline"],
)
def test_bench_splits_says_nothing_of_experts_that_are_not_divided(
    assignments: list[list[list[int]]],
) -> None:
    """Only where experts are divided do the ranks' loads differ."""
    assert splits._expert_metrics(assignments) == {}


def test_bench_splits_reports_unmeasured_split_when_its_processes_fail_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other splits are measured, as when pipeline splits cannot run over NCCL."""
    starter = "import sys; sys.exit('no such way to split')"
    echo = (
        "import json, sys\n"
        "print(json.dumps({'weights_mib': 1.0}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    parts = ('compute_ms', 'collectives_ms', 'waiting_ms', 'collectives')\n"
        "    answer = {'step_ms': 2.0, 'assignments': [[], []], **dict.fromkeys(parts, 0.5)}\n"
        "    print(json.dumps(answer), flush=True)\n"
    )
    program = f"import sys\nexec({starter!r} if sys.argv[3] == 'pipeline' else {echo!r})"
    monkeypatch.setattr(splits, "_PROGRAM", [sys.executable, "-c", program])
    plan = _plan(
        tmp_path, "--backend", "ring", "--batches", "2", "--prefills", "6", "--repeats", "1"
    )
    report = Report(benchmark="splits", machine={})
    splits.measure(plan, report)
    assert [set(case.series) for case in report.cases] == [
        {"one", "tensor", "expert", "tensor+expert"}
    ] * 2
    decode, prefill = report.cases
    assert isinstance(decode, Case)
    assert (decode.conditions[PART], prefill.conditions[PART]) == ("decode", "prefill")
    assert decode.values("expert", "tokens_per_s") == [1_000.0]
    assert prefill.values("one", "tokens_per_s") == [3_000.0]
    assert set(decode.ratios) == {
        "tensor/one tokens_per_s",
        "expert/one tokens_per_s",
        "tensor+expert/one tokens_per_s",
        "expert/tensor tokens_per_s",
        "tensor+expert/tensor tokens_per_s",
    }
    assert report.notes == ["pipeline was not measured: no such way to split"]


def test_random_model_preset_with_experts_has_shapes_of_real_model() -> None:
    """The layers of Qwen3-30B-A3B have 128 experts of 768 hidden units."""
    preset = PRESETS["30b-a3b-half"]
    shapes = _layer_shapes(preset, 0)
    assert shapes["model.layers.0.mlp.switch_mlp.up_proj.weight"] == (128, 768, 2_048)
    assert shapes["model.layers.0.mlp.gate.weight"] == (128, 2_048)
    assert "model.layers.0.mlp.up_proj.weight" not in shapes
    assert _layer_shapes(PRESETS["tiny"], 0)["model.layers.0.mlp.up_proj.weight"] == (768, 256)
