"""Sampler compared with numpy; draws depend only on logits, settings, seed and position."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from services.rank_worker.sampling.gumbel_max import gumbel_noise, truncate
from services.rank_worker.sampling.keys import draw_key, initial_state
from services.rank_worker.sampling.row_settings import RowSettings
from services.rank_worker.sampling.sampler import Sampler
from services.rank_worker.sampling.vocabulary import VocabularyPart
from shared.messages import Sampling

VOCAB = 97
Numbers = np.ndarray[Any, np.dtype[Any]]


def _logits(rows: int, seed: int = 0, vocab_size: int = VOCAB) -> Numbers:
    return np.random.default_rng(seed).normal(0.0, 3.0, (rows, vocab_size)).astype(np.float32)


def _sampler(
    settings: Sequence[Sampling],
    prompts: Sequence[Sequence[int]] = (),
    completions: Sequence[Sequence[int]] = (),
    vocab_size: int = VOCAB,
) -> Sampler:
    sampler = Sampler(VocabularyPart(vocab_size), lambda ids: ids)
    for index, sampling in enumerate(settings):
        sampler.admit(
            index,
            sampling,
            np.array(prompts[index] if prompts else [], dtype=np.int32),
            np.array(completions[index] if completions else [], dtype=np.int32),
        )
    return sampler


def _tokens(
    sampler: Sampler, logits: Numbers, ids: Sequence[int], positions: Sequence[int]
) -> list[int]:
    tokens: Any = sampler.sample(mx.array(logits), ids, positions).tokens.tolist()
    return list(tokens)


def _penalized(
    logits: Numbers, sampling: Sampling, prompt: Sequence[int], completion: Sequence[int]
) -> Numbers:
    out = logits.astype(np.float64)
    for token, addend in sampling.logit_bias:
        if token < len(out):
            out[token] += addend
    for token in set(prompt) | set(completion):
        penalty = sampling.repetition_penalty
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token in set(completion):
        out[token] -= sampling.frequency_penalty * list(completion).count(token)
        out[token] -= sampling.presence_penalty
    return out


def test_greedy_rows_with_penalties_and_bias_take_token_numpy_computes() -> None:
    """Greedy rows with penalties and bias take the token that numpy computes."""
    mixes = [
        Sampling(seed=1, temperature=0.0, repetition_penalty=1.8),
        Sampling(seed=1, temperature=0.0, frequency_penalty=1.5),
        Sampling(seed=1, temperature=0.0, presence_penalty=3.0, repetition_penalty=0.7),
        Sampling(seed=1, temperature=0.0, logit_bias=[(5, 4.0), (VOCAB + 7, 9.0), (6, -4.0)]),
        Sampling(seed=1, temperature=0.0, logit_bias=[(3, 2.0)], frequency_penalty=-0.8),
        Sampling(seed=1, temperature=0.0),
    ]
    random = np.random.default_rng(1)
    histories = [[random.integers(0, VOCAB, 12).tolist() for _ in mixes] for _ in range(2)]
    prompts, completions = histories
    sampler = _sampler(mixes, prompts, completions)

    for step in range(12):
        logits = _logits(len(mixes), seed=step)
        got = _tokens(sampler, logits, range(len(mixes)), [24 + step] * len(mixes))
        for row, sampling in enumerate(mixes):
            adjusted = _penalized(logits[row], sampling, prompts[row], completions[row])
            assert got[row] == adjusted.argmax()
            completions[row].append(got[row])


def test_frequency_penalty_counts_drawn_tokens_whose_results_are_unread() -> None:
    """With a huge frequency penalty no token repeats, although no result is read in between."""
    sampler = _sampler([Sampling(seed=1, temperature=0.0, frequency_penalty=100.0)])
    logits = mx.array(_logits(1))

    drawn = [sampler.sample(logits, [0], [step]).tokens for step in range(VOCAB)]

    assert sorted(int(np.array(one)[0]) for one in drawn) == list(range(VOCAB))


def test_new_sequence_does_not_inherit_token_counts_of_slot() -> None:
    """A sequence in the slot of a dropped one does not inherit its counts."""
    sampling = Sampling(seed=1, temperature=0.0, frequency_penalty=100.0)
    sampler = _sampler([sampling] * 6)
    logits = _logits(1)
    first = _tokens(sampler, np.repeat(logits, 6, 0), range(6), [0] * 6)
    sampler.drop(2)
    empty = np.zeros(0, dtype=np.int32)
    sampler.admit(77, sampling, empty, empty)

    again = _tokens(sampler, np.repeat(logits, 2, 0), [77, 3], [0, 1])

    assert again[0] == first[2]
    assert again[1] != first[3]


def _kept(scaled: Numbers, sampling: Sampling) -> set[int]:
    order = np.argsort(-scaled, kind="stable")
    order = order[: sampling.top_k or None]
    shares = np.exp(scaled[order].astype(np.float64) - scaled.max())
    shares /= shares.sum()
    before = np.cumsum(shares) - shares
    keep = (before < sampling.top_p) & (shares >= sampling.min_p * shares[0])
    keep[0] = True
    return set(order[keep].tolist())


CUTS = [
    Sampling(seed=1, top_k=1),
    Sampling(seed=1, top_k=10),
    Sampling(seed=1, top_k=10 * VOCAB),
    Sampling(seed=1, top_p=0.9),
    Sampling(seed=1, top_p=0.01),
    Sampling(seed=1, min_p=0.05),
    Sampling(seed=1, min_p=1.0),
    Sampling(seed=1, top_k=20, top_p=0.7, min_p=0.02),
    Sampling(seed=1, top_k=7, top_p=0.999),
]


def test_top_k_top_p_and_min_p_keep_tokens_numpy_keeps() -> None:
    """top_k, then top_p of the rest, then min_p keep the tokens that numpy keeps, row by row."""
    scaled = _logits(len(CUTS), seed=5)
    rows = [RowSettings(sampling, VOCAB) for sampling in CUTS]

    order = np.argsort(-scaled, kind="stable")
    kept = np.array(truncate(mx.array(np.take_along_axis(scaled, order, -1)), rows))

    for row, sampling in enumerate(CUTS):
        assert set(order[row][kept[row]].tolist()) == _kept(scaled[row], sampling)


def test_draws_return_only_tokens_that_top_k_and_top_p_keep() -> None:
    """Thousands of draws return only tokens that top-k and top-p keep."""
    sampling = Sampling(seed=3, temperature=1.5, top_k=6, top_p=0.95)
    logits = _logits(1, seed=6)
    sampler = _sampler([sampling] * 500)
    drawn: set[int] = set()
    for step in range(4):
        drawn |= set(_tokens(sampler, np.repeat(logits, 500, 0), range(500), range(500)))
        drawn |= set(_tokens(sampler, np.repeat(logits, 500, 0), range(500), [step] * 500))
        positions = range(1_000 * step, 1_000 * step + 500)
        drawn |= set(_tokens(sampler, np.repeat(logits, 500, 0), range(500), positions))

    assert drawn <= _kept(logits[0] / 1.5, sampling)
    assert len(drawn) > 2


@pytest.mark.parametrize(
    "sampling",
    [Sampling(seed=11, temperature=0.7), Sampling(seed=11, temperature=1.3, top_k=12, top_p=0.97)],
    ids=["plain", "cut"],
)
def test_sampled_tokens_follow_softmax_distribution(sampling: Sampling) -> None:
    """20,000 draws at different positions pass a chi-square test at 0.1 %."""
    logits = np.random.default_rng(2).normal(0.0, 1.0, (1, 24)).astype(np.float32)
    sampler = _sampler([sampling] * 1_000, vocab_size=24)
    counts = np.zeros(24)
    for start_at in range(0, 20_000, 1_000):
        positions = range(start_at, start_at + 1_000)
        tokens = _tokens(sampler, np.repeat(logits, 1_000, 0), range(1_000), positions)
        counts += np.bincount(tokens, minlength=24)
    scaled = logits[0] / sampling.temperature
    kept = sorted(_kept(scaled, sampling))
    shares = np.exp(scaled[kept].astype(np.float64))
    expected = shares / shares.sum() * 20_000

    assert counts.sum() == counts[kept].sum() == 20_000
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    # 0.1 % point of chi-square with 23 degrees of freedom; fewer degrees have a lower one.
    assert chi_square < 49.73


def test_sampling_noise_of_row_has_equal_bits_in_any_batch() -> None:
    """The noise of a key has the same bits alone, in any batch and at any place in it."""
    states = [initial_state(seed) for seed in (1, 2**63 - 1)]
    row_keys = [draw_key(state, position) for state in states for position in (0, 9, 77)]
    batch = np.array(gumbel_noise(row_keys, 1_001))

    for index, one in enumerate(row_keys):
        alone = np.array(mx.random.gumbel((1_001,), key=mx.array(list(one), dtype=mx.uint32)))
        assert batch[index].tobytes() == alone.tobytes()
    assert np.array(gumbel_noise(row_keys[::-1], 1_001))[::-1].tobytes() == batch.tobytes()
    assert len({row.tobytes() for row in batch}) == len(row_keys)


def test_sampling_noise_equals_frozen_values() -> None:
    """The first noise values equal frozen ones; a change would change every seeded completion."""
    noise = np.array(
        gumbel_noise([draw_key(initial_state(0), 0), draw_key(initial_state(42), 1_000)], 4)
    )

    np.testing.assert_allclose(noise, FROZEN_NOISE, rtol=1e-5)


def test_mixed_batch_draws_same_tokens_as_single_rows() -> None:
    """Rows with different settings draw the same tokens in one batch as alone."""
    mixes = [
        Sampling(seed=5, temperature=0.0),
        Sampling(seed=6, temperature=1.0),
        Sampling(seed=7, temperature=0.9, top_p=0.8, top_logprobs=2),
        Sampling(seed=8, temperature=1e-9),
        Sampling(seed=9, temperature=1.1, frequency_penalty=1.0, top_k=9),
        Sampling(seed=10, temperature=0.6, logit_bias=[(4, 5.0)], top_logprobs=0),
        Sampling(seed=11, temperature=0.0, repetition_penalty=1.4),
    ]
    count = len(mixes)
    prompts = [[index, index + 1] for index in range(count)]
    together = _sampler(mixes, prompts)
    apart = [_sampler([mixes[index]], [prompts[index]]) for index in range(count)]
    for step in range(8):
        logits = _logits(count, seed=step)
        got = _tokens(together, logits, range(count), [2 + step] * count)
        alone = [_tokens(apart[i], logits[i : i + 1], [0], [2 + step])[0] for i in range(count)]
        assert got == alone
        assert got[0] == logits[0].argmax()
        assert got[3] == logits[3].argmax()


def test_log_probabilities_ignore_bias_penalties_and_temperature() -> None:
    """Log probabilities are of the unmodified logits; alternatives are sorted and as many as
    requested.
    """
    mixes = [
        Sampling(seed=5, temperature=0.0, top_logprobs=20, logit_bias=[(13, 100.0)]),
        Sampling(seed=6, temperature=1.7, top_k=3, top_logprobs=0),
        Sampling(seed=7, temperature=0.5),
        Sampling(seed=8, temperature=0.5, top_logprobs=5, repetition_penalty=2.0),
    ]
    logits = _logits(4, seed=9)
    drawn = _sampler(mixes, [[1, 2]] * 4).sample(mx.array(logits), range(4), [2] * 4)
    assert drawn.logprobs is not None
    tokens: Any = drawn.tokens.tolist()
    truth = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))

    results = drawn.logprobs.read(4)

    assert tokens[0] == 13
    assert results[2] == []
    for row, count in ((0, 20), (1, 0), (3, 5)):
        (got,) = results[row]
        order = np.argsort(-truth[row], kind="stable")[:count]
        assert got.logprob == pytest.approx(truth[row][tokens[row]], abs=1e-4)
        assert got.top_ids == order.tolist()
        assert got.top_logprobs == pytest.approx(truth[row][order].tolist(), abs=1e-4)


def test_extreme_sampling_settings_and_infinite_logits_draw_valid_token() -> None:
    """The limits of all settings, and logits of minus infinity, give a valid token."""
    mixes = [
        Sampling(seed=1, temperature=1e-4),
        Sampling(seed=1, temperature=100.0),
        Sampling(seed=1, temperature=1.0, top_p=1e-9),
        Sampling(seed=1, temperature=1.0, repetition_penalty=1e-30),
        Sampling(seed=1, temperature=1.0, logit_bias=[(9, 1e9), (10, -1e9)]),
        Sampling(seed=1, temperature=1e-5, logit_bias=[(9, 1e9)], min_p=1.0),
        Sampling(seed=2**63 - 1, temperature=1.0, frequency_penalty=-100.0),
    ]
    logits = _logits(len(mixes), seed=4)
    logits[:, 50:] = -np.inf
    count = len(mixes)

    got = _tokens(_sampler(mixes, [[1]] * count), logits, range(count), [2**40] * count)

    assert all(0 <= token < 50 for token in got)
    assert got[0] == logits[0].argmax()
    assert got[2] == logits[2].argmax()
    assert got[4] == got[5] == 9


def test_bfloat16_greedy_row_takes_lowest_tied_token_and_sampled_row_valid_one() -> None:
    """bfloat16 logits give a valid draw; ties of greedy rows go to the lowest id."""
    logits = mx.zeros((2, VOCAB), dtype=mx.bfloat16)
    mixes = [Sampling(seed=1, temperature=0.0), Sampling(seed=1, temperature=1.0)]
    tokens: Any = _sampler(mixes).sample(logits, [0, 1], [0, 0]).tokens.tolist()

    assert tokens[0] == 0
    assert 0 <= tokens[1] < VOCAB


FROZEN_NOISE = [
    [-0.120037, -0.704677, 0.639571, 1.11136],
    [-1.566394, 2.975622, -0.490218, -0.276797],
]
