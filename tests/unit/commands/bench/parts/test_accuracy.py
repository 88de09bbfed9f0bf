"""`lockstep bench accuracy`: command line, figures and refusals, with ranks that are not real."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.commands.bench.measuring.report import Report
from services.commands.bench.parts import accuracy, worlds
from services.commands.bench.parts.accuracy import Continuation, compared_places, other_bits
from shared.errors import ConfigError, UnavailableError, UsageError
from tests.unit.commands.bench.bench_arguments import plan_of

Answer = Callable[[Mapping[str, Any]], dict[str, Any]]

NEW_TOKENS = 2
KV_BITS = "rank_worker.kv_bits=8"


def _plan(tmp_path: Path, *argv: str) -> accuracy.AccuracyPlan:
    plan: accuracy.AccuracyPlan = plan_of(tmp_path, "accuracy", "--model", "demo", *argv)
    return plan


class _Ranks:
    """Ranks that continue a text with its last token and the next id, with the same logprobs.

    With quantized KV the second token of all texts but the first one has other bits in a batch.
    """

    def __init__(self, settings: Mapping[str, str], refused_batch: int) -> None:
        self.descriptions = [
            {"device": "none", "kind": "cpu", "layers": 1, "layers_state": "x", "weights_mib": 1.0}
        ]
        self._is_quantized = "LOCKSTEP_RANK_WORKER_KV_BITS" in settings
        self._refused_batch = refused_batch

    def request(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        texts: Sequence[list[int]] = order["texts"]
        if len(texts) == self._refused_batch:
            return [{"refused": "Too many."}]
        logprobs = [[-1.0, -2.0] for _ in texts]
        if self._is_quantized:
            for one in logprobs[1:]:
                one[1] = -2.5
        tokens = [[text[-1], text[-1] + 1] for text in texts]
        return [{"tokens": tokens, "logprobs": logprobs}]

    def close(self) -> None:
        """Nothing runs."""


class _Reference:
    """mlx-lm's code, which finds another likeliest token in the second place.

    As float32 it is 0.125 away from `_Ranks`, otherwise 0.375 from float32.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._second = -2.125 if "LOCKSTEP_MODEL_DTYPE" in settings else -2.5

    def request(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        first, second = order["tokens"]
        assert order["text"][-1] == first == second - 1
        return [{"logprobs": [-1.0, self._second], "likeliest": [first, second + 1]}]

    def close(self) -> None:
        """Nothing runs."""


def _measure(
    monkeypatch: pytest.MonkeyPatch,
    plan: accuracy.AccuracyPlan,
    *,
    refused_batch: int = 0,
    fails: str = "",
) -> Report:
    """Measure with ranks that are not real; the one with this name does not start."""

    def start(
        _plan: object, name: str, _size: int, settings: Mapping[str, str], program: str = ""
    ) -> Any:
        if name == fails:
            raise UnavailableError("It ended. The end of its log:\nTraceback\nNo memory is left.")
        return _Reference(settings) if program else _Ranks(settings, refused_batch)

    monkeypatch.setattr(worlds, "start_ranks", start)
    monkeypatch.setattr(accuracy, "start_ranks", start)
    report = Report(benchmark="accuracy", machine={})
    accuracy.measure(plan, report)
    return report


def test_bench_accuracy_without_flags_uses_documented_defaults(tmp_path: Path) -> None:
    """One text alone comes first; texts are long enough to have different lengths."""
    plan = _plan(tmp_path)
    assert (plan.batches, plan.prompt_tokens, plan.new_tokens) == ([1, 16, 64], 256, 32)
    assert (plan.ranks, plan.compare) == ([1], {})


@pytest.mark.parametrize(
    ("argv", "error", "message"),
    [
        (["--prompt-tokens", "64"], UsageError, "158 or more tokens"),
        (["--compare", "rank_worker.wrong=1"], ConfigError, "WRONG is not a setting"),
        (
            ["--ranks", "1,3", "--compare", "rank_worker.batch_invariant=true"],
            ConfigError,
            "world.size is 3",
        ),
    ],
)
def test_bench_accuracy_refuses_wrong_command_line_before_any_process_starts(
    tmp_path: Path,
    argv: list[str],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Settings are checked as ranks of a world of that size check them."""
    with pytest.raises(error, match=message):
        _measure(monkeypatch, _plan(tmp_path, *argv), fails="accuracy-0")


@pytest.mark.parametrize("batches", ["1,4", "4,1", "4,4"])
def test_errors_and_other_bits_are_those_of_each_contender(
    tmp_path: Path, batches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of the batches makes no difference, and every repeat adds one figure."""
    argv = ["--batches", batches, "--new-tokens", str(NEW_TOKENS), "--repeats", "2"]
    report = _measure(monkeypatch, _plan(tmp_path, *argv, "--compare", KV_BITS))
    assert [case.conditions["batch"] for case in report.cases] == [*map(int, batches.split(","))]
    for case in report.cases:
        found = {
            name: [series[metric] for metric in accuracy.COLUMNS if metric in series]
            for name, series in case.series.items()
        }
        quantized, mean, other = ([0.375, 0.15625, 0.375], 0.15625, 0.375)
        if case.conditions["batch"] == 1:
            quantized, mean, other = ([0.125], 0.0625, 0.0)
        assert found == {
            "lockstep": [[0.0625] * 2, [0.125] * 2, [0.5] * 2, [0.0] * 2],
            KV_BITS: [[mean] * 2, [max(quantized)] * 2, [0.5] * 2, [other] * 2],
            "mlx-lm": [[0.1875] * 2, [0.375] * 2, [0.0] * 2],
        }
        assert case.ratios["lockstep/mlx-lm error_mean"] == [pytest.approx(1 / 3)] * 2
    assert not [one for one in report.notes if "not measured" in one]


def test_batch_that_does_not_fit_is_a_note_and_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once, not once per repeat; without any batch nothing was measured."""
    plan = _plan(tmp_path, "--batches", "1,4", "--new-tokens", "2", "--repeats", "2")
    report = _measure(monkeypatch, plan, refused_batch=4)
    assert [case.conditions for case in report.cases] == [{"batch": 1}]
    assert report.notes[0] == "lockstep was not measured in batch 4: Too many."
    assert sum("Too many" in one for one in report.notes) == 1
    with pytest.raises(UnavailableError, match=r"Nothing was measured\. .* in batch 1"):
        _measure(monkeypatch, _plan(tmp_path, "--batches", "1"), refused_batch=1)


def test_other_bits_are_measured_also_if_float32_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same is true of mlx-lm's own code and of other contenders: a note says why."""
    plan = _plan(tmp_path, "--batches", "4", "--new-tokens", "2", "--compare", KV_BITS)
    for fails, subject in (
        ("the-float32-reference", "the float32 reference"),
        ("mlx-lm", "mlx-lm"),
        ("accuracy-1", KV_BITS),
    ):
        report = _measure(monkeypatch, plan, fails=fails)
        (case,) = report.cases
        assert f"{subject} was not measured: No memory is left." in report.notes
        assert case.values("lockstep", "other_bits") == [0.0] * 3
        assert ("error_mean" in case.series["lockstep"]) == (fails != "the-float32-reference")
        assert (KV_BITS in case.series) == (fails != "accuracy-1")
        assert ("mlx-lm" in case.series) == (fails == "accuracy-1")
    with pytest.raises(UnavailableError, match="No memory is left"):
        _measure(monkeypatch, plan, fails="accuracy-0")


def test_compared_texts_are_spread_over_a_batch() -> None:
    """All of a small batch, and at most eight of a large one, the first among them."""
    assert list(compared_places(1)) == [0]
    assert list(compared_places(8)) == list(range(8))
    assert list(compared_places(16)) == list(range(0, 16, 2))
    for batch in range(1, 200):
        places = compared_places(batch)
        assert len(places) <= accuracy.COMPARED_TEXTS
        assert 2 * places[-1] >= batch - 1


def test_no_bits_are_equal_from_the_first_other_token_on() -> None:
    """A probability that differs counts once, and a token that differs for all that follow."""
    alone = Continuation([], [1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0])
    for tokens, logprobs, expected in (
        ([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0], 0.0),
        ([1, 2, 3, 4], [-1.0, -2.5, -3.0, -4.0], 0.25),
        ([1, 2, 5, 4], [-1.0, -2.0, -3.0, -4.0], 0.5),
    ):
        assert other_bits(alone, Continuation([], tokens, logprobs)) == expected
