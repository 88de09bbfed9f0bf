"""`lockstep bench step` and `prefill`: their command lines and the lengths of their rows."""

from pathlib import Path

import pytest

from services.commands.bench.measuring.report import Report
from services.commands.bench.measuring.row_lengths import uneven_lengths
from services.commands.bench.parts import prefill, step, worlds
from shared.errors import ConfigError, UsageError
from tests.unit.commands.bench.bench_arguments import plan_of


def _plan(tmp_path: Path, *argv: str) -> step.DecodeStepPlan:
    plan: step.DecodeStepPlan = plan_of(tmp_path, "step", "--model", "demo", *argv)
    return plan


def test_bench_step_without_flags_uses_documented_defaults(tmp_path: Path) -> None:
    """Batches of 1 to 64 rows of up to 1,024 tokens; every `--compare` adds a contender."""
    plan = _plan(tmp_path)
    assert (plan.batches, plan.context, plan.steps) == ([1, 4, 16, 64], [1_024], 32)
    assert (plan.kv_bits, plan.compare, plan.settings) == (None, {}, {})
    two = ("rank_worker.kv_bits=8,rank_worker.blas=off", "model.dtype=float32")
    assert (plan.drafts, _plan(tmp_path, "--drafts", "4").drafts) == (0, 4)
    plan = _plan(tmp_path, "--quick", "--compare", two[0], "--compare", two[1])
    assert (plan.batches, plan.context) == ([1, 4], [256])
    assert plan.compare == {
        two[0]: {"LOCKSTEP_RANK_WORKER_KV_BITS": "8", "LOCKSTEP_RANK_WORKER_BLAS": "off"},
        two[1]: {"LOCKSTEP_MODEL_DTYPE": "float32"},
    }


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--compare", "rank_worker.wrong=1"], ConfigError),
        (["--set", "rank_worker.kv_bits=5"], ConfigError),
        (["--compare", "kv_bits=8"], UsageError),
        (["--kv-bits", "5"], UsageError),
        (["--batches", "64", "--context", "100"], UsageError),
    ],
)
def test_bench_step_refuses_wrong_command_line_before_any_process_starts(
    tmp_path: Path, argv: list[str], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings are checked as a rank worker checks them."""
    started: list[object] = []
    monkeypatch.setattr(worlds, "start_ranks", lambda *args: started.append(args))
    with pytest.raises(error):
        step.measure(_plan(tmp_path, *argv), Report(benchmark="step", machine={}))
    assert not started


def test_bench_prefill_without_flags_uses_documented_defaults(tmp_path: Path) -> None:
    """New prompts are measured besides those of later turns, so 0 cached tokens are allowed."""
    plan: prefill.PrefillPlan = plan_of(tmp_path, "prefill", "--model", "demo")
    assert (plan.prompts, plan.tokens, plan.cached) == ([1, 4, 16], [128, 512], [0, 1_024])
    assert (plan.ranks, plan.rounds, plan.compare) == ([1], 3, {})
    with pytest.raises(UsageError, match="not an integer of 1 or more"):
        plan_of(tmp_path, "prefill", "--model", "demo", "--tokens", "0")
    for tokens, message in (("100", "158 or more tokens"), ("128,2049", "chunks of 2048 tokens")):
        wrong = plan_of(
            tmp_path, "prefill", "--model", "demo", "--prompts", "64", "--tokens", tokens
        )
        with pytest.raises(UsageError, match=message):
            prefill.measure(wrong, Report(benchmark="prefill", machine={}))


def test_rows_have_different_lengths_from_six_tenths_of_the_context() -> None:
    """The shortest context that a refusal names is enough."""
    assert sorted(uneven_lengths(5, 1_000)) == [600, 700, 800, 900, 1_000]
    assert uneven_lengths(1, 7) == [7]
    for batch in range(2, 200):
        context = -(-5 * (batch - 1) // 2)
        lengths = uneven_lengths(batch, context)
        assert len(set(lengths)) == batch
        assert (min(lengths) >= 0.6 * context, max(lengths)) == (True, context)
        with pytest.raises(UsageError, match=f"{context} or more tokens"):
            uneven_lengths(batch, context - 1)
