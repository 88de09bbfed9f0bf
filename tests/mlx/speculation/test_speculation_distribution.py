"""Distribution of tokens generated with drafts: it equals the model's, for any drafts."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import KVCache

from services.rank_worker.sampling.draft_acceptance import count_accepted
from services.rank_worker.sampling.drafts import StepDrafts
from services.rank_worker.sampling.sampler import Sampler
from services.rank_worker.sampling.vocabulary import VocabularyPart
from shared.messages import Sampling
from tests.mlx.speculation.speculation_driver import NO_BLOCKS, SpeculationDriver
from tests.mlx.token_distribution import fits_distribution, token_probabilities

VOCAB = 6
ROWS = 48
DRAWS = 20_000
SETTINGS = {
    "plain": Sampling(seed=1, temperature=0.8),
    "cut": Sampling(seed=2, temperature=1.2, top_p=0.95, top_k=5, logit_bias=[(2, 0.5)]),
}


class FirstOrderMarkovModel(nn.Module):
    """Model whose next token depends on the last one only: its logits are a table."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        table = np.random.default_rng(3).normal(0.0, 0.8, (VOCAB, VOCAB))
        self.table = mx.array(table.astype(np.float32))
        self.layers = [nn.Identity()]

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        """Return the table's row of each token, [rows, count, VOCAB]; the cache gets dummy
        values.
        """
        if cache is not None:
            ones = mx.ones((tokens.shape[0], 1, tokens.shape[1], 4))
            cache[0].update_and_fetch(ones, ones)
        return self.table[tokens]

    def make_cache(self) -> list[KVCache]:
        """Return one plain cache."""
        return [KVCache()]


def _pairs(
    model: FirstOrderMarkovModel, sampling: Sampling, propose: Callable[[int], list[int]]
) -> np.ndarray:
    """Generate with drafts; return how often each token followed each, [VOCAB, VOCAB]."""
    driver = SpeculationDriver(model, ROWS, 8_192, block_tokens=NO_BLOCKS)
    for one in range(ROWS):
        seeded = Sampling(**{**_fields(sampling), "seed": 1_000 * sampling.seed + one})
        driver.start(one, one, [one % VOCAB], seeded)
    sequence_ids = list(range(ROWS))
    while sum(map(len, driver.tokens.values())) < DRAWS:
        drafts = {one: propose(driver.tokens[one][-1]) for one in sequence_ids}
        driver.step(decodes=sequence_ids, drafts=drafts)
    counts = np.zeros((VOCAB, VOCAB))
    for one in sequence_ids:
        known = [one % VOCAB, *driver.tokens[one]]
        np.add.at(counts, (known[:-1], known[1:]), 1)
    return counts


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def _proposers(truth: np.ndarray) -> dict[str, Callable[[int], list[int]]]:
    """Return functions that propose three drafts after a token."""
    chance = np.random.default_rng(5)

    def likeliest(token: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(3):
            token = int(truth[token].argmax())
            drafts.append(token)
        return drafts

    return {
        "likeliest": likeliest,
        "always 3": lambda _: [3, 3, 3],
        "any": lambda _: chance.integers(0, VOCAB, chance.integers(0, 4)).tolist(),
    }


@pytest.mark.proof
@pytest.mark.parametrize("proposer", ["likeliest", "always 3", "any"])
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_tokens_sampled_with_drafts_follow_model_distribution(
    sampling: Sampling, proposer: str
) -> None:
    """20,000 tokens generated with drafts follow the distribution of the model."""
    model = FirstOrderMarkovModel()
    truth = token_probabilities(np.array(model.table), sampling)

    assert fits_distribution(_pairs(model, sampling, _proposers(truth)[proposer]), truth)


@pytest.mark.parametrize("proposer", ["likeliest", "any"])
def test_distribution_test_fails_when_wrong_drafts_are_accepted(
    monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    """The distribution test fails when likely drafts are accepted although another token was
    drawn.
    """
    model, sampling = FirstOrderMarkovModel(), SETTINGS["plain"]
    truth = token_probabilities(np.array(model.table), sampling)

    def biased(drafts: Sequence[int], tokens: Sequence[int]) -> int:
        honest = count_accepted(drafts, tokens)
        before = tokens[honest - 1] if honest else None
        if before is None or honest == len(drafts) or truth[before, drafts[honest]] <= 0.1:
            return honest
        return honest + 1

    monkeypatch.setattr("services.rank_worker.execution.step_sampling.count_accepted", biased)
    monkeypatch.setattr(SpeculationDriver, "_check_run", lambda *_: None)

    assert not fits_distribution(_pairs(model, sampling, _proposers(truth)[proposer]), truth)


def test_sampling_with_drafts_draws_same_tokens_as_plain_steps() -> None:
    """Up to the first rejected draft the drawn tokens and the counts are those of plain steps.

    The rows have penalties, bias, cut-offs and log probabilities.
    """
    mixes = [
        Sampling(seed=1, temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.2),
        Sampling(seed=2, temperature=1.0, presence_penalty=1.5, top_k=30, top_logprobs=3),
        Sampling(seed=3, temperature=0.7, logit_bias=[(4, 3.0)]),
        Sampling(seed=4, temperature=0.0),
    ]
    vocab, steps = 41, 5
    logits = np.random.default_rng(1).normal(0.0, 2.0, (len(mixes), steps, vocab))
    logits = logits.astype(np.float32)
    single, several = (Sampler(VocabularyPart(vocab), lambda ids: ids) for _ in range(2))
    for sampler in (single, several):
        for one, mix in enumerate(mixes):
            prompt = np.array([one, one + 1], dtype=np.int32)
            sampler.admit(one, mix, prompt, np.array([7], dtype=np.int32))
    ids = list(range(len(mixes)))
    truth: Any = [
        single.sample(mx.array(logits[:, step]), ids, [3 + step] * 4).tokens.tolist()
        for step in range(steps)
    ]
    drafts = {one: [truth[step][one] for step in range(steps - 1)] for one in ids[:3]}
    drafts[1][2] = (drafts[1][2] + 1) % vocab
    rows = [one for one in ids for _ in range(steps if one in drafts else 1)]
    places = [*list(range(steps)) * 3, 0]
    given = StepDrafts(
        {one: len(some) for one, some in drafts.items()},
        [draft for some in drafts.values() for draft in some],
    )
    drawn = several.sample(
        mx.array(logits[rows, places]), rows, [3 + place for place in places], given
    )
    tokens: Any = drawn.tokens.tolist()

    assert [one for one, row in zip(tokens, rows, strict=True) if row == 0] == [
        truth[step][0] for step in range(steps)
    ]
    assert tokens[5:8] == [truth[step][1] for step in range(3)]
    assert tokens[10:] == [truth[step][2] for step in range(steps)] + [truth[0][3]]
    assert drawn.logprobs is not None
    assert [len(one) for one in drawn.logprobs.read(16)] == [0] * 5 + [1] * 5 + [0] * 6
    several.count([(0, drawn.tokens[:5]), (1, drawn.tokens[5:8]), (2, drawn.tokens[10:15])])
    shorter = Sampler(VocabularyPart(vocab), lambda ids: ids)
    for one in (0, 1):
        known = [7, *(truth[step][one] for step in range(5 if one == 0 else 3))]
        shorter.admit(one, mixes[one], np.array([one, one + 1]), np.array(known))
    for mine, theirs in zip(
        several._counts.read([0, 1]), shorter._counts.read([0, 1]), strict=True
    ):
        np.testing.assert_array_equal(np.array(mine), np.array(theirs))
