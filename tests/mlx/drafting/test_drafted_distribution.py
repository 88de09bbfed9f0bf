"""Distribution of tokens generated with drafters: it equals the model's, for any drafter."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from services.rank_worker.sampling.draft_acceptance import count_accepted
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter
from shared.messages import Sampling
from tests.mlx.drafting.drafter_driver import DrafterDriver, draft_model_of
from tests.mlx.drafting.markov_model import VOCAB, SecondOrderMarkovModel, exact_head
from tests.mlx.token_distribution import fits_distribution, token_probabilities

ROWS = 48
DRAWS = 20_000
SETTINGS = {
    "plain": Sampling(seed=1, temperature=0.8),
    "cut": Sampling(seed=2, temperature=1.2, top_p=0.95, top_k=5, logit_bias=[(2, 0.5)]),
}
DRAFTS: dict[str, Callable[[], LoadedDrafter]] = {
    "model": lambda: draft_model_of(SecondOrderMarkovModel(seed=9)),
    "same model": lambda: draft_model_of(SecondOrderMarkovModel()),
    "head": lambda: exact_head(noise=0.3),
    "knowing head": exact_head,
}


def _generate(draft: LoadedDrafter, sampling: Sampling) -> DrafterDriver:
    """Generate with up to three drafts per step."""
    driver = DrafterDriver(SecondOrderMarkovModel(), draft, ROWS, 8_192)
    for one in range(ROWS):
        seeded = msgspec.structs.replace(sampling, seed=1_000 * sampling.seed + one)
        driver.start(one, one, [one % VOCAB, one // VOCAB % VOCAB], seeded)
    sequence_ids = list(range(ROWS))
    step = 0
    while sum(map(len, driver.tokens.values())) < DRAWS:
        step += 1
        counts = {one: 3 if (one + step) % 5 else step % 3 for one in sequence_ids}
        driver.step(decodes=sequence_ids, counts=counts)
    return driver


def _count_tokens(driver: DrafterDriver) -> np.ndarray:
    """Return how often each token followed each pair, [VOCAB * VOCAB, VOCAB]."""
    counts = np.zeros((VOCAB * VOCAB, VOCAB))
    for one in range(ROWS):
        known = np.array(driver.all_tokens(one))
        np.add.at(counts, (known[:-2] * VOCAB + known[1:-1], known[2:]), 1)
    return counts


def _fits_model(driver: DrafterDriver, sampling: Sampling) -> bool:
    """Test the tokens after all frequent pairs against the model's distribution."""
    counts = _count_tokens(driver)
    probabilities = token_probabilities(SecondOrderMarkovModel().pairs(), sampling)
    frequent = counts.sum(axis=1) >= 200
    assert counts[frequent].sum() > 0.9 * counts.sum()
    counts, probabilities = counts[frequent], probabilities[frequent]
    expected = counts.sum(axis=1, keepdims=True) * probabilities
    assert expected[probabilities > 0].min() > 1
    return fits_distribution(counts, probabilities)


@pytest.mark.proof
@pytest.mark.parametrize("proposer", DRAFTS)
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_tokens_generated_with_drafters_follow_distribution_of_model(
    sampling: Sampling, proposer: str
) -> None:
    """20,000 tokens generated with drafts follow the distribution of the model.

    Every draft of a drafter that equals the model is accepted.
    """
    driver = _generate(DRAFTS[proposer](), sampling)

    assert _fits_model(driver, sampling)
    share = driver.accepted_drafts / driver.proposed_drafts
    assert share == 1.0 if proposer in {"same model", "knowing head"} else 0.2 < share < 0.9


@pytest.mark.parametrize("proposer", ["model", "head"])
def test_distribution_test_fails_when_drafts_are_accepted_too_often(
    monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    """The distribution test fails when drafts are accepted more often than they are drawn."""
    sampling = SETTINGS["plain"]
    chance = np.random.default_rng(5)

    def biased(drafts: Sequence[int], tokens: list[int]) -> int:
        honest = count_accepted(drafts, tokens)
        if honest == len(drafts) or chance.random() > 0.25:
            return honest
        tokens[honest] = drafts[honest]
        return honest + 1

    monkeypatch.setattr("services.rank_worker.execution.step_sampling.count_accepted", biased)

    driver = _generate(DRAFTS[proposer](), sampling)

    assert not _fits_model(driver, sampling)


def test_eagle_head_computing_exact_hidden_states_has_all_greedy_drafts_accepted() -> None:
    """Every greedy draft of a head that computes the next hidden state exactly is accepted.

    The steps are ragged and include prompts and outputs of the head itself.
    """
    driver = DrafterDriver(SecondOrderMarkovModel(), exact_head(), 6, 256)
    greedy = Sampling(seed=0, temperature=0.0)
    sequence_ids = list(range(6))
    for one in sequence_ids:
        driver.start(one, one, [1, 2, 3, 4, 5, 0][: one + 1], greedy)
    plans: list[dict[int, int]] = [
        {0: 1, 1: 2, 2: 3, 3: 4, 4: 5, 5: 6},
        {0: 16, 2: 1, 3: 0},
        {},
        {0: -1, 1: -1, 2: 7},
        dict.fromkeys(sequence_ids, 3),
    ]
    for counts in plans:
        driver.step(decodes=sequence_ids, counts=counts)
    together: Any = list(driver.tokens.values())

    assert (
        driver.accepted_drafts
        == driver.proposed_drafts
        == sum(max(0, n) for p in plans for n in p.values())
    )
    assert all(len(set(tokens)) > 1 for tokens in together)
