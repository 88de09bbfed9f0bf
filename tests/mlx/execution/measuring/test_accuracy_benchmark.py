"""`lockstep bench accuracy`: continuations, their log probabilities, and errors of these."""

import json
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn

from services.commands.bench.fake_ranks import standalone_rank
from services.commands.bench.fake_ranks.continuations import TextContinuer
from services.commands.bench.fake_ranks.reference_model import read_again
from services.commands.bench.fake_ranks.row_filler import RowFiller
from services.commands.bench.measuring.processes import LOCKSTEP_COMMAND
from services.rank_worker.model.loading.loader import OpenedModel
from services.rank_worker.peers.collectives import Collectives
from shared.configuration.settings import ModelConfig, SchedulerConfig
from shared.errors import ConfigError, UsageError
from shared.model.location import demo_folder
from tests.mlx.executor_driver import generate_with_mlx_lm, make_executor, make_prompt
from tests.mlx.models import MakeModel, make_llama

TEXTS = [make_prompt(one, 20 + 3 * one) for one in range(3)]
NEW_TOKENS = 5


def _continuer(
    model: nn.Module, chunk_tokens_max: int = 2_048, step_tokens_max: int = 8_192, kv: int = 2**30
) -> TextContinuer:
    executor = make_executor(model)
    rows = RowFiller(executor, SchedulerConfig(), 4_096, lambda: kv)
    return TextContinuer(executor, rows, chunk_tokens_max, step_tokens_max)


@pytest.mark.parametrize("tokens_max", [(2_048, 8_192), (2_048, 30), (7, 30)])
def test_texts_are_continued_as_mlx_lm_continues_each_alone(tokens_max: tuple[int, int]) -> None:
    """Also where texts are read in several steps or chunks, and after others were in the rows."""
    continuer = _continuer(make_llama(3), *tokens_max)
    for texts in (TEXTS, TEXTS[:2]):
        found = continuer.write(texts, NEW_TOKENS)
        rows = zip(texts, found["tokens"], found["logprobs"], strict=True)
        for text, tokens, logprobs in rows:
            expected, logits = generate_with_mlx_lm(make_llama(3), text, NEW_TOKENS)
            assert tokens == expected
            of_drawn = [
                row[token] - mx.logsumexp(mx.array(row)).item()
                for row, token in zip(logits, expected, strict=True)
            ]
            assert logprobs == pytest.approx(of_drawn, abs=1e-5)


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", "qwen3_next"])
def test_reference_reads_the_tokens_that_it_is_given(make_model: MakeModel, family: str) -> None:
    """It finds the probabilities of an executor's tokens, and the likeliest ones."""
    found = _continuer(make_model(family)).write(TEXTS[:1], NEW_TOKENS)
    (tokens,), (logprobs,) = found["tokens"], found["logprobs"]
    reading = read_again(make_model(family), TEXTS[0], tokens)
    assert reading["logprobs"] == pytest.approx(logprobs, abs=1e-4)
    assert reading["likeliest"] == tokens
    # Another first token is less likely, and the second one is read after it.
    other = [tokens[0] + 1, tokens[1]]
    reading = read_again(make_model(family), TEXTS[0], other)
    assert reading["likeliest"][0] == tokens[0]
    assert reading["logprobs"][0] < logprobs[0]
    assert reading["logprobs"][1] != pytest.approx(logprobs[1], abs=1e-4)


@pytest.mark.parametrize(
    ("new_tokens", "kv", "message"), [(4_096, 2**30, "4096 at most"), (2_000, 2**20, "GiB, and KV")]
)
def test_texts_that_do_not_fit_are_refused_in_a_sentence(
    new_tokens: int, kv: int, message: str
) -> None:
    """The next ones are not affected."""
    continuer = _continuer(make_llama(3), kv=kv)
    with pytest.raises(UsageError, match=message):
        continuer.write(TEXTS, new_tokens)
    assert len(continuer.write(TEXTS, 2)["tokens"]) == 3


def test_share_that_does_not_fit_is_refused_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for this rank in collectives. No weight has been read."""
    world, model = standalone_rank.join("off"), ModelConfig(path=str(demo_folder()))
    monkeypatch.setattr(OpenedModel, "read", lambda *_: pytest.fail("weights were read"))
    with monkeypatch.context() as patched:
        patched.setattr(standalone_rank, "rank_memory_bytes", lambda *_: 1)
        with pytest.raises(ConfigError, match="This rank's shard does not fit"):
            standalone_rank.load(world, model, "none")
    monkeypatch.setattr(Collectives, "all_agree", lambda *_: False)
    with pytest.raises(ConfigError, match="Another rank's share"):
        standalone_rank.load(world, model, "none")


@pytest.mark.proof
def test_bench_accuracy_of_demo_model_finds_errors_and_invariance(tmp_path: Path) -> None:
    """16 bits have errors like mlx-lm's own, KV of 4 bits larger ones, invariant rows no others."""
    options = ["--model", "demo", "--quick", "--repeats", "1", "--json", "--logs", str(tmp_path)]
    names = [f"rank_worker.{one}" for one in ("fast_path=off", "kv_bits=4", "batch_invariant=true")]
    compared = [word for name in names for word in ("--compare", name)]
    done = subprocess.run(
        [
            *LOCKSTEP_COMMAND,
            "bench",
            "accuracy",
            *options,
            *compared,
            "--set",
            "model.dtype=float16",
        ],
        check=True,
        capture_output=True,
        timeout=300,
    )
    alone, beside = (one["series"] for one in json.loads(done.stdout)["cases"])
    for series in (alone, beside):
        errors = {name: one["error_mean"]["median"] for name, one in series.items()}
        plain, four_bits, invariant = (errors[name] for name in names)
        assert errors["mlx-lm"] > 0.0
        assert max(plain, invariant, errors["lockstep"]) < 5 * errors["mlx-lm"]
        assert four_bits > 5 * errors["mlx-lm"]
    # One row alone is what mlx-lm computes.
    assert alone[names[0]]["error_mean"] == alone["mlx-lm"]["error_mean"]
    assert {one["other_bits"]["median"] for one in alone.values() if "other_bits" in one} == {0.0}
    assert beside[names[2]]["other_bits"]["median"] == 0.0
