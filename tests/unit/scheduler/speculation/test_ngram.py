"""Prompt lookup: what it proposes, that it is exact, and what it costs in operations and bytes."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.speculation.ngram import gram_index
from services.scheduler.speculation.ngram.gram_index import GramIndex
from services.scheduler.speculation.ngram.proposer import _GRAMS, MATCHED_MAX, NgramProposer

texts = st.integers(1, 6).flatmap(
    lambda kinds: st.lists(st.integers(0, kinds), min_size=0, max_size=200)
)


def proposer_of(tokens: list[int], heard: list[tuple[int, bool]] | None = None) -> NgramProposer:
    """Return a proposer that has taken in a whole text."""
    kept = [] if heard is None else heard
    proposer = NgramProposer(tokens, lambda matched, hit: kept.append((matched, hit)))
    while proposer.extend(64):
        pass
    return proposer


def occurrences(tokens: list[int], size: int) -> list[int]:
    """Return where the last tokens ended before, the latest first, by looking everywhere."""
    last, count = tokens[len(tokens) - size :], len(tokens)
    if count < size:
        return []
    return [end for end in range(count - 1, size - 1, -1) if tokens[end - size : end] == last]


def common(tokens: list[int], source: int) -> int:
    """Return how many tokens before a place equal the last ones."""
    matched = 0
    while (
        matched < min(MATCHED_MAX, source)
        and tokens[source - matched - 1] == tokens[len(tokens) - matched - 1]
    ):
        matched += 1
    return matched


def searched(tokens: list[int]) -> tuple[int, int]:
    """Return (source, matched) by looking everywhere; (0, 0): nothing."""
    for size, candidates in _GRAMS:
        found = [(common(tokens, end), end) for end in occurrences(tokens, size)[:candidates]]
        if found:
            matched, source = max(found)
            return source, matched
    return 0, 0


@given(texts, st.integers(2, 5))
def test_index_finds_what_a_search_finds(tokens: list[int], size: int) -> None:
    """Every earlier occurrence is found, the latest first, and nothing else."""
    index = GramIndex(tokens, size)
    while index.add(7):
        pass
    assert list(index.earlier_ends(len(tokens))) == occurrences(tokens, size)


@given(texts, st.integers(2, 4))
def test_index_is_exact_over_many_tables(tokens: list[int], size: int) -> None:
    """Tables that follow each other are one index, whatever their size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram_index, "_BUCKETS_MIN", 2)
        index = GramIndex(tokens, size)
        for _ in tokens:
            index.add(1)
    assert list(index.earlier_ends(len(tokens))) == occurrences(tokens, size)


@given(texts, st.integers(2, 3))
def test_index_is_exact_when_all_hashes_are_equal(tokens: list[int], size: int) -> None:
    """Hashes only say where to look: tokens decide."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram_index, "hash", lambda gram: 5, raising=False)
        index = GramIndex(tokens, size)
        while index.add(50):
            pass
        assert list(index.earlier_ends(len(tokens))) == occurrences(tokens, size)


@given(texts)
def test_longest_match_is_found(tokens: list[int]) -> None:
    """A text taken in at once is matched as a search by eye would, the latest of the longest."""
    proposer = proposer_of(tokens)
    source, matched = searched(tokens)
    assert proposer.matched == matched
    expected = (tokens[source:] * 40)[:16] if matched else []
    assert proposer.propose(16) == expected


@given(texts, st.lists(st.integers(0, 3), max_size=60), st.integers(0, 16))
def test_proposals_continue_earlier_occurrences(
    tokens: list[int], coming: list[int], count: int
) -> None:
    """Token by token, a proposal is what followed the last tokens earlier, and as long a match."""
    proposer = proposer_of(tokens)
    for token in coming:
        tokens.append(token)
        proposer.extend(8)
        drafts, matched = proposer.propose(count), proposer.matched
        assert matched >= searched(tokens)[1]
        assert bool(drafts) == (matched > 0 and count > 0)
        if not matched:
            continue
        sources = [
            end
            for end in range(matched, len(tokens))
            if tokens[end - matched : end] == tokens[len(tokens) - matched :]
        ]
        assert drafts in [(tokens[source:] * 40)[:count] for source in sources]


@given(texts, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=20))
def test_it_is_judged_by_what_comes(tokens: list[int], steps: list[list[int]]) -> None:
    """Each token that could have been proposed is judged once, proposed or not."""
    heard: list[tuple[int, bool]] = []
    proposer = proposer_of(tokens, heard)
    for step in steps:
        heard.clear()
        drafts, matched = proposer.propose(len(step)), proposer.matched
        tokens += step
        proposer.extend(64)
        expected = []
        for place, draft in enumerate(drafts):
            expected.append((min(MATCHED_MAX, matched + place), draft == step[place]))
            if draft != step[place]:
                break
        assert heard == expected


def test_a_period_goes_on_past_the_end() -> None:
    """Text that repeats a short phrase is proposed for as long as asked."""
    proposer = proposer_of([9, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert proposer.propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_the_latest_of_equal_matches_is_taken() -> None:
    """What was said last is what is likely to follow."""
    proposer = proposer_of([1, 2, 3, 4, 50, 1, 2, 3, 4, 60, 7, 1, 2, 3, 4])
    assert proposer.propose(2) == [60, 7]


def test_a_longer_match_beats_a_later_one() -> None:
    """Boilerplate that came again since does not distract from what is copied."""
    first = [11, 12, 1, 2, 3, 4, 50, 51]
    proposer = proposer_of([*first, 13, 1, 2, 3, 4, 60, 61, 11, 12, 1, 2, 3, 4])
    assert proposer.propose(2) == [50, 51]


def test_a_copy_stays_on_its_source() -> None:
    """A line that occurs a hundred times does not take a copy off its place."""
    line = [1, 2, 3, 4, 5]
    prompt = [token for number in range(100) for token in (*line, 1_000 + number)]
    tokens = prompt + prompt[: 6 * 20]
    proposer = proposer_of(prompt)
    assert proposer.propose(1) == [] or proposer.matched
    for token in tokens[len(prompt) :]:
        prompt.append(token)
        proposer.extend(32)
    for number in range(20, 40):
        for token in (*line, 1_000 + number):
            prompt.append(token)
            proposer.extend(32)
    assert proposer.propose(6) == [*line, 1_040]


def test_nothing_is_known_of_one_occurrence() -> None:
    """Text in which no two tokens come again has no proposals."""
    assert proposer_of(list(range(500))).propose(5) == []
    assert proposer_of([]).propose(5) == []
    assert proposer_of([4, 4]).propose(5) == []


def test_tokens_not_taken_in_are_not_proposed_from() -> None:
    """Between a token and the next `extend` nothing is proposed: it would be for another place."""
    tokens = [1, 2, 3, 1, 2]
    proposer = proposer_of(tokens)
    assert proposer.propose(1) == [3]
    tokens.append(3)
    assert proposer.propose(1) == []


def test_an_index_in_the_making_proposes_from_what_it_has() -> None:
    """A long prompt is taken in by slices of the budget; only its seen part is proposed from."""
    tokens = [*range(2_000), 700, 701, 702, 703]
    proposer = NgramProposer(tokens, lambda matched, hit: None)
    slices: list[int] = []
    while proposer.tokens_unindexed:
        assert proposer.propose(2) == ([704, 705] if sum(slices) >= 702 else [])
        slices.append(proposer.extend(100))
    assert max(slices) <= 100
    assert proposer.propose(2) == [704, 705]


def test_another_text_begins_anew() -> None:
    """After `reset` nothing of the text before is proposed."""
    proposer = proposer_of([1, 2, 3, 1, 2])
    proposer.reset([5, 6, 7, 1, 2])
    proposer.extend(100)
    assert proposer.propose(3) == []


def test_many_tokens_at_once_are_not_judged() -> None:
    """What comes back after a restart was not sampled one by one, and teaches nothing."""
    heard: list[tuple[int, bool]] = []
    tokens = [1, 2, 3, 4] * 5
    proposer = proposer_of(tokens, heard)
    tokens += [1, 2, 3, 4] * 20
    proposer.extend(1_000)
    assert heard == []
    assert proposer.propose(4) == [1, 2, 3, 4]


def worst_texts(count: int) -> dict[str, list[int]]:
    """Return texts that are hard on an index."""
    rnd = random.Random(3)
    return {
        "random": [rnd.randrange(32_000) for _ in range(count)],
        "binary": [rnd.randrange(2) for _ in range(count)],
        "constant": [7] * count,
        "boilerplate": ([1, 2, 3, 4, 5, 6] * count)[:count],
    }


@pytest.mark.parametrize("kind", ["random", "binary", "constant", "boilerplate"])
def test_a_step_costs_the_same_at_any_length(kind: str) -> None:
    """Operations per token are bounded, and no more at 40,000 tokens than at 4,000."""
    cost = {}
    for count in (4_000, 40_000):
        tokens = worst_texts(count + 400)[kind]
        known = tokens[:count]
        proposer = proposer_of(known)
        before = proposer.buckets_read + proposer.compared
        for token in tokens[count:]:
            known.append(token)
            proposer.extend(32)
            proposer.propose(16)
        cost[count] = (proposer.buckets_read + proposer.compared - before) / 400
    assert cost[40_000] < 2 * cost[4_000] + 8
    assert cost[40_000] < 400


@pytest.mark.parametrize("kind", ["random", "binary", "constant", "boilerplate"])
def test_work_per_slice_is_bounded(kind: str) -> None:
    """No slice of a long prompt costs much more than its tokens, growing included."""
    proposer = NgramProposer(worst_texts(40_000)[kind], lambda matched, hit: None)
    work = [0]
    while proposer.extend(256):
        work.append(proposer.buckets_read + proposer.compared)
    assert max(after - before for before, after in pairwise(work)) < 256 * 2 * 8 + 1_500


@pytest.mark.parametrize("kind", ["random", "binary", "constant", "boilerplate"])
def test_memory_is_bounded(kind: str) -> None:
    """An index takes less than the list of the tokens themselves (8 bytes, and the numbers)."""
    proposer = proposer_of(worst_texts(40_000)[kind])
    assert proposer.bytes_held < 32 * 40_000


def test_old_text_is_forgotten() -> None:
    """A text longer than the window takes no more memory than the window, and goes on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram_index, "WINDOW_TOKENS", 2_048)
        for kind in ("random", "constant", "binary"):
            held = []
            tokens = worst_texts(30_000)[kind]
            known: list[int] = []
            proposer = NgramProposer(known, lambda matched, hit: None)
            for begin in range(0, 30_000, 300):
                known += tokens[begin : begin + 300]
                proposer.extend(300)
                held.append(proposer.bytes_held)
            assert max(held) < 24 * 3 * 2_048
            known += known[-1_000:-990]
            proposer.extend(10)
            assert proposer.matched >= 2
