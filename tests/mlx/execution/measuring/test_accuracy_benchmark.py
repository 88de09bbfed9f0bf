"""`lockstep bench accuracy`: continuations, their log probabilities, and errors of these."""

import json
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn

from services.commands.bench.fake_ranks.continuations import Continuations
from services.commands.bench.fake_ranks.reference_model import log_probabilities
from services.commands.bench.fake_ranks.row_filler import RowFiller
from services.commands.bench.measuring.processes import LOCKSTEP_COMMAND
from services.commands.bench.measuring.report import Case
from services.commands.bench.parts import accuracy
from shared.configuration.settings import SchedulerConfig
from shared.errors import UsageError
from tests.mlx.executor_driver import generate_with_mlx_lm, make_executor, make_prompt
from tests.mlx.models import MakeModel, make_llama

TEXTS = [make_prompt(one, 20 + 3 * one) for one in range(3)]
NEW_TOKENS = 5


def _continuations(model: nn.Module, step_tokens_max: int = 8_192) -> Continuations:
    executor = make_executor(model)
    rows = RowFiller(executor, SchedulerConfig(), 4_096, lambda: 2**30)
    return Continuations(executor, rows, step_tokens_max)


@pytest.mark.parametrize("step_tokens_max", [8_192, 30])
def test_texts_are_continued_as_mlx_lm_continues_each_alone(step_tokens_max: int) -> None:
    """Also when the texts do not fit into one step, and after others were in the rows."""
    model = make_llama(3)
    continuations = _continuations(model, step_tokens_max)
    for texts in (TEXTS, TEXTS[:2]):
        found = continuations.write(texts, NEW_TOKENS)
        for text, tokens, logprobs in zip(texts, *found.values(), strict=True):
            expected, logits = generate_with_mlx_lm(make_llama(3), text, NEW_TOKENS)
            assert tokens == expected
            of_drawn = [
                row[token] - mx.logsumexp(mx.array(row)).item()
                for row, token in zip(logits, expected, strict=True)
            ]
            assert logprobs == pytest.approx(of_drawn, abs=1e-5)


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", "qwen3_next"])
def test_reference_gives_given_tokens_their_log_probabilities(
    make_model: MakeModel, family: str
) -> None:
    """They are those of the same float32 model, whose tokens the executor has drawn."""
    found = _continuations(make_model(family)).write(TEXTS[:1], NEW_TOKENS)
    (tokens,), (logprobs,) = found.values()
    expected = log_probabilities(make_model(family), TEXTS[0], tokens)
    assert logprobs == pytest.approx(expected, abs=1e-4)


def test_texts_that_do_not_fit_are_refused_in_a_sentence() -> None:
    """The next ones are not affected."""
    continuations = _continuations(make_llama(3))
    with pytest.raises(UsageError, match="4096 at most"):
        continuations.write(TEXTS, 4_096)
    assert len(continuations.write(TEXTS, 2)["tokens"]) == 3


def test_bits_are_compared_up_to_first_other_token() -> None:
    """A value that differs counts once, and a token that differs for all that follow."""

    def continued(tokens: list[list[int]], logprobs: list[list[float]]) -> accuracy.Continued:
        return accuracy.Continued(Case(conditions={}), "lockstep", [], tokens, logprobs)

    alone = continued([[1, 2, 3, 4]], [[-1.0, -2.0, -3.0, -4.0]])
    for tokens, logprobs, expected in (
        ([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0], 1.0),
        ([1, 2, 3, 4], [-1.0, -2.5, -3.0, -4.0], 0.75),
        ([1, 2, 5, 4], [-1.0, -2.0, -3.0, -4.0], 0.5),
    ):
        beside = continued([tokens, [7] * 4], [logprobs, [-7.0] * 4])
        assert accuracy.equal_part(alone, beside) == expected


@pytest.mark.proof
def test_bench_accuracy_of_demo_model_finds_errors_and_invariance(tmp_path: Path) -> None:
    """mlx-lm's layers have mlx-lm's error, KV of 4 bits a large one, and invariant rows none."""
    options = ["--model", "demo", "--quick", "--repeats", "1", "--json", "--logs", str(tmp_path)]
    names = [f"rank_worker.{one}" for one in ("fast_path=off", "kv_bits=4", "batch_invariant=true")]
    compared = [word for name in names for word in ("--compare", name)]
    done = subprocess.run(
        [*LOCKSTEP_COMMAND, "bench", "accuracy", *options, *compared],
        check=True,
        capture_output=True,
        timeout=300,
    )
    alone, beside = (one["series"] for one in json.loads(done.stdout)["cases"])
    for series in (alone, beside):
        errors = {name: one["error_mean"]["median"] for name, one in series.items()}
        own, four_bits, invariant = (errors[name] for name in names)
        assert max(own, invariant, errors["lockstep"], errors["mlx-lm"]) < 1e-4
        assert four_bits > 1e-3
        assert all(one["error_max"]["median"] >= errors[name] for name, one in series.items())
    assert alone[names[0]]["error_mean"]["median"] == alone["mlx-lm"]["error_mean"]["median"]
    assert beside[names[2]]["same_bits"]["median"] == 1.0
    assert not any("same_bits" in one for one in alone.values())
