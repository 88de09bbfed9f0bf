"""What comes out of proposals follows the model's distribution, whatever proposes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from services.rank_worker.sampling.draft_acceptance import count_accepted
from services.rank_worker.sampling.gumbel_max import truncate
from services.rank_worker.sampling.row_settings import read_settings
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter
from shared.messages import Sampling
from tests.mlx.drafting.drafter_driver import DraftDriver, draft_model
from tests.mlx.drafting.markov_model import VOCAB, Chain, knowing_head

ROWS = 48
DRAWS = 20_000
SETTINGS = {
    "plain": Sampling(seed=1, temperature=0.8),
    "cut": Sampling(seed=2, temperature=1.2, top_p=0.95, top_k=5, logit_bias=[(2, 0.5)]),
}
DRAFTS: dict[str, Callable[[], LoadedDrafter]] = {
    "model": lambda: draft_model(Chain(seed=9)),
    "same model": lambda: draft_model(Chain()),
    "head": lambda: knowing_head(noise=0.3),
    "knowing head": knowing_head,
}


def _truth(model: Chain, sampling: Sampling) -> np.ndarray:
    """Return the probabilities of each token behind each pair, [VOCAB * VOCAB, VOCAB]."""
    logits = model.pairs()
    for token, addend in sampling.logit_bias:
        logits[:, token] += addend
    scaled = logits / sampling.temperature
    settings = [read_settings(sampling, VOCAB)] * len(scaled)
    order, kept = (np.array(one) for one in truncate(mx.array(scaled), settings))
    shares = np.zeros(scaled.shape)
    for row in range(len(scaled)):
        chosen = order[row][kept[row]]
        shares[row, chosen] = np.exp(scaled[row, chosen])
    normalized: np.ndarray = shares / shares.sum(axis=1, keepdims=True)
    return normalized


def _generate(draft: LoadedDrafter, sampling: Sampling) -> DraftDriver:
    """Generate with three drafts a step, or fewer."""
    driver = DraftDriver(Chain(), draft, ROWS, 8_192)
    for one in range(ROWS):
        seeded = msgspec.structs.replace(sampling, seed=1_000 * sampling.seed + one)
        driver.open(one, one, [one % VOCAB, one // VOCAB % VOCAB], seeded)
    everybody = list(range(ROWS))
    step = 0
    while sum(map(len, driver.tokens.values())) < DRAWS:
        step += 1
        counts = {one: 3 if (one + step) % 5 else step % 3 for one in everybody}
        driver.step(decodes=everybody, counts=counts)
    return driver


def _counted(driver: DraftDriver) -> np.ndarray:
    """Return how often each token came behind each pair."""
    counts = np.zeros((VOCAB * VOCAB, VOCAB))
    for one in range(ROWS):
        known = np.array(driver.known(one))
        np.add.at(counts, (known[:-2] * VOCAB + known[1:-1], known[2:]), 1)
    return counts


def _is_likely(counts: np.ndarray, truth: np.ndarray) -> bool:
    """Chi-square of all pairs that came often, at the 0.1 % point (Wilson and Hilferty)."""
    often = counts.sum(axis=1) >= 200
    assert counts[often].sum() > 0.9 * counts.sum()
    counts, truth = counts[often], truth[often]
    possible = truth > 0
    assert counts[~possible].sum() == 0
    expected = counts.sum(axis=1, keepdims=True) * truth
    assert expected[possible].min() > 1
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - len(truth)
    third = 2 / (9 * freedom)
    return bool(statistic < freedom * (1 - third + 3.0902 * math.sqrt(third)) ** 3)


@pytest.mark.proof
@pytest.mark.parametrize("proposer", DRAFTS)
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_generated_tokens_follow_the_models_distribution(sampling: Sampling, proposer: str) -> None:
    """20,000 tokens generated with proposals, good and bad ones: which token follows which pair is
    as likely as the model says, at more than 0.1 %. What knows the model is always accepted."""
    driver = _generate(DRAFTS[proposer](), sampling)

    assert _is_likely(_counted(driver), _truth(Chain(), sampling))
    share = driver.agreed / driver.proposed
    assert share == 1.0 if proposer in {"same model", "knowing head"} else 0.2 < share < 0.9


@pytest.mark.parametrize("proposer", ["model", "head"])
def test_a_bias_in_what_is_accepted_is_caught(
    monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    """If a draft were accepted more often than it is drawn, the same test would fail."""
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

    assert not _is_likely(_counted(driver), _truth(Chain(), sampling))


def test_a_head_that_knows_the_model_is_right_greedily() -> None:
    """Each hidden state meets the token behind it, in prompts, ragged steps and the head's own
    outputs: the head that computes the next one exactly has every draft accepted."""
    driver = DraftDriver(Chain(), knowing_head(), 6, 256)
    greedy = Sampling(seed=0, temperature=0.0)
    everybody = list(range(6))
    for one in everybody:
        driver.open(one, one, [1, 2, 3, 4, 5, 0][: one + 1], greedy)
    plans: list[dict[int, int]] = [
        {0: 1, 1: 2, 2: 3, 3: 4, 4: 5, 5: 6},
        {0: 16, 2: 1, 3: 0},
        {},
        {0: -1, 1: -1, 2: 7},
        dict.fromkeys(everybody, 3),
    ]
    for counts in plans:
        driver.step(decodes=everybody, counts=counts)
    together: Any = list(driver.tokens.values())

    assert driver.agreed == driver.proposed == sum(max(0, n) for p in plans for n in p.values())
    assert all(len(set(tokens)) > 1 for tokens in together)
