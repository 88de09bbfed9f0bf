"""Sampling from parts of the logits on several ranks, compared with sampling from all of them."""

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rank_worker.sampling.drafts import StepDrafts
from services.rank_worker.sampling.row_settings import RowSettings
from services.rank_worker.sampling.sampler import Sampler
from services.rank_worker.sampling.vocabulary import VocabularyPart, part_size
from shared.messages import Sampling, TokenLogprobs
from tests.mlx.sharding.in_process_exchanges import InProcessExchanges
from tests.support.effort import cases

Numbers = np.ndarray[Any, np.dtype[Any]]
RANKS = (2, 3, 4)


class _World:
    """Samplers of one rank with the whole head and of several ranks with its parts."""

    def __init__(self, vocab_size: int, ranks: int, samplings: list[Sampling]) -> None:
        self._exchanges = InProcessExchanges()
        self.vocabularies = [
            VocabularyPart(vocab_size, rank, ranks, self._exchanges.gather) for rank in range(ranks)
        ]
        self.whole = Sampler(VocabularyPart(vocab_size), lambda ids: ids)
        self.parts = [Sampler(one, lambda ids: ids) for one in self.vocabularies]
        for sampler in (self.whole, *self.parts):
            for number, sampling in enumerate(samplings):
                history = np.arange(number, number + 9, dtype=np.int32) % vocab_size
                sampler.admit(number, sampling, history[:5], history[5:])

    def check(
        self,
        logits: Numbers,
        positions: list[int],
        exclusions: Numbers | None = None,
        drafts: StepDrafts | None = None,
        ids: list[int] | None = None,
    ) -> list[int]:
        """Sample with both; compare tokens, highest logits and log probabilities.

        Returns:
            The tokens.
        """
        ids = list(range(len(logits))) if ids is None else ids
        masks = None if exclusions is None else mx.array(exclusions)
        expected = self.whole.sample(mx.array(logits), ids, positions, drafts, masks)
        found = self._exchanges.run(
            [
                lambda one=one, sampler=sampler: sampler.sample(  # type: ignore[misc]
                    one.own(mx.array(logits)), ids, positions, drafts, masks
                )
                for one, sampler in zip(self.vocabularies, self.parts, strict=True)
            ]
        )
        for one in found:
            assert one.tokens.tolist() == expected.tokens.tolist()
            assert one.top_logits.tolist() == expected.top_logits.tolist()
            _compare_logprobs(
                one.logprobs.read(len(ids)) if one.logprobs else [],
                expected.logprobs.read(len(ids)) if expected.logprobs else [],
                logits,
            )
        tokens: Any = expected.tokens.tolist()
        return list(tokens)

    def draft(self, logits: Numbers, positions: list[int]) -> None:
        """Sample drafts with both, and compare them."""
        ids = list(range(len(logits)))
        expected = self.whole.sample_drafts(mx.array(logits), ids, positions, of_part=True)
        found = self._exchanges.run(
            [
                lambda one=one, sampler=sampler: sampler.sample_drafts(  # type: ignore[misc]
                    one.own(mx.array(logits)), ids, positions, of_part=True
                )
                for one, sampler in zip(self.vocabularies, self.parts, strict=True)
            ]
        )
        assert all(one.tolist() == expected.tolist() for one in found)


def _compare_logprobs(
    found: list[list[TokenLogprobs]], expected: list[list[TokenLogprobs]], logits: Numbers
) -> None:
    assert len(found) == len(expected)
    for row, (some, others) in enumerate(zip(found, expected, strict=True)):
        assert len(some) == len(others)
        for one, other in zip(some, others, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-5)
            assert len(set(one.top_ids)) == len(one.top_ids)
            # Of tokens with equal logits any may be among the likeliest.
            ranked = sorted((logits[row][token] for token in other.top_ids), reverse=True)
            assert sorted((logits[row][token] for token in one.top_ids), reverse=True) == ranked


MIXES = [
    Sampling(seed=1, temperature=0.0),
    Sampling(seed=2, temperature=0.8),
    Sampling(seed=3, temperature=1.0, top_k=20, top_p=0.9),
    Sampling(seed=4, temperature=1.3, min_p=0.1),
    Sampling(seed=5, temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, top_logprobs=20),
    Sampling(seed=6, temperature=0.0, repetition_penalty=1.7, presence_penalty=1.0),
    Sampling(seed=7, temperature=0.7, frequency_penalty=0.9, logit_bias=[(3, 4.0), (90, -5.0)]),
    Sampling(seed=8, temperature=0.0, top_logprobs=3, logit_bias=[(206, 9.0)]),
    Sampling(seed=9, temperature=0.6, top_logprobs=0),
]
"""Settings that candidates decide."""
WHOLE_ROWS = [
    Sampling(seed=10, temperature=0.9, top_p=0.9),
    Sampling(seed=11, temperature=1.1, top_p=0.5, min_p=0.01, top_logprobs=2),
    Sampling(seed=12, temperature=1.0, top_k=100),
]
"""Settings that need all logits."""


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("vocab_size", [7, 97, 211, 1_024])
def test_parts_of_any_vocabulary_give_the_tokens_of_the_whole(vocab_size: int, ranks: int) -> None:
    """All settings, alone and mixed, on vocabularies that the ranks do and do not divide evenly."""
    random = np.random.default_rng(vocab_size)
    for samplings in (MIXES, MIXES + WHOLE_ROWS, *([one] for one in MIXES + WHOLE_ROWS)):
        world = _World(vocab_size, ranks, samplings)
        for step in range(4):
            logits = random.normal(0.0, 3.0, (len(samplings), vocab_size)).astype(np.float32)
            world.check(logits, [20 + step] * len(samplings))


def test_only_steps_with_rows_that_need_all_logits_gather_them() -> None:
    """Steps are counted by kind; a step of candidates exchanges a small part of the bytes."""
    vocab_size = 4_096
    logits = np.zeros((1, vocab_size), dtype=np.float32)
    sent = {}
    for sampling in MIXES + WHOLE_ROWS:
        world = _World(vocab_size, 2, [sampling])
        world.check(logits, [5])
        (steps,) = {(one.candidate_steps > 0, one.gathered_steps > 0) for one in world.vocabularies}
        assert steps == (sampling in MIXES, sampling in WHOLE_ROWS)
        sent[sampling.seed] = sum(one.nbytes for one in world._exchanges.results)
    assert all(sent[one.seed] < 3_000 for one in MIXES)
    assert all(sent[one.seed] == 4 * vocab_size for one in WHOLE_ROWS)


def test_masked_rows_draw_the_same_tokens_even_if_one_part_is_excluded() -> None:
    """Masks of grammars apply to the part of each rank; a whole part may be excluded."""
    random = np.random.default_rng(3)
    samplings = MIXES + WHOLE_ROWS
    world = _World(211, 4, samplings)
    for allowed in ([0], [210], [63, 64], range(64, 128), range(0, 211, 7)):
        exclusions = np.full((len(samplings), 211), -np.inf, dtype=np.float32)
        exclusions[:, list(allowed)] = 0.0
        logits = random.normal(0.0, 3.0, (len(samplings), 211)).astype(np.float32)
        tokens = world.check(logits, [9] * len(samplings), exclusions)
        assert set(tokens) <= set(allowed)


def test_rows_with_drafts_and_penalties_draw_the_same_tokens() -> None:
    """Each row of a sequence counts the drafts before it, on the rank that has their logits."""
    random = np.random.default_rng(4)
    samplings = [
        Sampling(seed=1, temperature=0.9, frequency_penalty=2.0),
        Sampling(seed=2, temperature=0.0, repetition_penalty=1.9),
        Sampling(seed=3, temperature=0.8, top_k=10),
    ]
    world = _World(211, 2, samplings)
    drafts = StepDrafts({0: 2, 2: 3}, [150, 3, 9, 10, 200])
    ids = [0, 0, 0, 1, 2, 2, 2, 2]
    for _ in range(5):
        logits = random.normal(0.0, 2.0, (len(ids), 211)).astype(np.float32)
        world.check(logits, [30, 31, 32, 7, 40, 41, 42, 43], drafts=drafts, ids=ids)


def test_drafts_of_a_divided_head_are_those_of_the_whole() -> None:
    """A drafter that uses the model's head draws the same drafts from its parts."""
    random = np.random.default_rng(5)
    for samplings in (MIXES, MIXES + WHOLE_ROWS, MIXES[:1]):
        world = _World(211, 2, samplings)
        logits = random.normal(0.0, 3.0, (len(samplings), 211)).astype(np.float32)
        world.draft(logits, [11] * len(samplings))


def test_logit_that_is_not_a_number_reaches_every_rank() -> None:
    """The highest logit of a row is not a number if that of any rank is not."""
    for sampling in (MIXES[0], MIXES[1], WHOLE_ROWS[0]):
        exchanges = InProcessExchanges()
        logits = np.ones((1, 200), dtype=np.float32)
        logits[0, 150] = np.nan
        ranks = []
        for rank in range(2):
            vocabulary = VocabularyPart(200, rank, 2, exchanges.gather)
            sampler = Sampler(vocabulary, lambda ids: ids)
            sampler.admit(0, sampling, np.zeros(1, np.int32), np.zeros(0, np.int32))
            own = vocabulary.own(mx.array(logits))
            ranks.append(lambda s=sampler, o=own: s.sample(o, [0], [1]))
        for found in exchanges.run(ranks):
            assert np.isnan(np.array(found.top_logits)).all()


_SETTINGS = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 63, 64, 65, 500]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.5]),
    logit_bias=st.lists(st.tuples(st.integers(0, 300), st.sampled_from([-2.0, 3.0])), max_size=3),
    top_logprobs=st.sampled_from([None, 0, 5, 20]),
)


@settings(max_examples=cases(25, 400), deadline=None)
@given(
    samplings=st.lists(_SETTINGS, min_size=1, max_size=5),
    vocab_size=st.sampled_from([7, 64, 65, 130, 257]),
    ranks=st.sampled_from(RANKS),
    levels=st.sampled_from([1, 3, 50, 100_000]),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_settings_and_logits_with_ties_give_the_same_tokens(
    samplings: list[Sampling], vocab_size: int, ranks: int, levels: int, seed: int
) -> None:
    """Few levels of logits make ties within parts and between them."""
    random = np.random.default_rng(seed)
    world = _World(vocab_size, ranks, samplings)
    for step in range(2):
        values = random.integers(0, levels, (len(samplings), vocab_size))
        world.check((values * (8.0 / levels)).astype(np.float32), [step + 9] * len(samplings))


def test_part_without_likely_tokens_offers_none_that_wins() -> None:
    """A penalty below 0 makes tokens 5 to 8, of the first rank, the only ones that min_p keeps."""
    sampling = Sampling(seed=210, temperature=0.7, min_p=0.5, frequency_penalty=-0.5)
    for ranks in RANKS:
        (token,) = _World(64, ranks, [sampling]).check(np.zeros((1, 64), np.float32), [9])
        assert token in range(5, 9)


def test_parts_cover_the_vocabulary_and_begin_at_multiples_where_possible() -> None:
    """Every token has exactly one rank, and no rank is without tokens."""
    for size, ranks in itertools.product((7, 10, 211, 4_096, 151_936, 262_208), (2, 3, 4)):
        parts = [VocabularyPart(size, rank, ranks, lambda array: array) for rank in range(ranks)]
        covered = [token for one in parts for token in (one.start, one.stop)]
        assert covered[0] == 0
        assert covered[-1] == size
        assert covered[1:-1:2] == covered[2::2]
        assert all(one.start < one.stop for one in parts)
        assert size < 1_000 or all(one.start % 64 == 0 for one in parts)
    assert part_size(3, 4) == 0
    assert part_size(5, 4) == 0


def test_rows_need_all_logits_only_where_candidates_cannot_decide() -> None:
    """top_k up to 64 and min_p are decided by candidates, top_p alone is not."""
    assert not any(RowSettings(one, 4_096).needs_whole_row for one in MIXES)
    assert all(RowSettings(one, 4_096).needs_whole_row for one in WHOLE_ROWS)
    greedy = Sampling(seed=1, temperature=0.0, top_p=0.5)
    assert not RowSettings(greedy, 4_096).needs_whole_row
