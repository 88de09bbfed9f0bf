"""N-gram proposals (prompt lookup): correctness, exactness, operations and bytes."""

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.speculation.ngram import gram_index
from services.scheduler.speculation.ngram.gram_index import GramIndex
from services.scheduler.speculation.ngram.proposer import _GRAMS, MATCHED_MAX, NgramProposer

texts = st.integers(1, 6).flatmap(
    lambda kinds: st.lists(st.integers(0, kinds), min_size=0, max_size=200)
)


def index_text(tokens: list[int], judged: list[tuple[int, bool]] | None = None) -> NgramProposer:
    """Return a proposer that has indexed a whole text."""
    kept = [] if judged is None else judged
    proposer = NgramProposer(tokens, lambda matched, hit: kept.append((matched, hit)))
    while proposer.extend(64):
        pass
    return proposer


def is_partly_indexed(proposer: NgramProposer) -> bool:
    """Return whether tokens of the text are not indexed yet."""
    return any(index.tokens_unindexed for index in proposer._indexes)


def index_bytes(proposer: NgramProposer) -> int:
    """Return the memory of all tables in bytes."""
    tables = [table for index in proposer._indexes for table in index._tables]
    return sum(4 * (len(one.buckets) + one.earlier.buffer_info()[1]) for one in tables)


class CountingTokens(list[int]):
    """A text that counts how often its tokens are read."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        """Return a token or a part of the text."""
        self.reads += 1
        return super().__getitem__(key)


def occurrences(tokens: list[int], size: int) -> list[int]:
    """Return the earlier ends of the last `size` tokens, the latest first, by a full search."""
    last, count = tokens[len(tokens) - size :], len(tokens)
    if count < size:
        return []
    return [end for end in range(count - 1, size - 1, -1) if tokens[end - size : end] == last]


def matched_length(tokens: list[int], source: int) -> int:
    """Return how many tokens before a position equal the last ones."""
    matched = 0
    while (
        matched < min(MATCHED_MAX, source)
        and tokens[source - matched - 1] == tokens[len(tokens) - matched - 1]
    ):
        matched += 1
    return matched


def search_longest_match(tokens: list[int]) -> tuple[int, int]:
    """Return (source, matched) by a full search; (0, 0): no match."""
    for size, candidates in _GRAMS:
        found = [
            (matched_length(tokens, end), end) for end in occurrences(tokens, size)[:candidates]
        ]
        if found:
            matched, source = max(found)
            return source, matched
    return 0, 0


@given(texts, st.integers(2, 5))
def test_ngram_index_finds_same_positions_as_full_search(tokens: list[int], size: int) -> None:
    """Every earlier occurrence is found, the latest first, and no other position."""
    index = GramIndex(tokens, size)
    while index.add(7):
        pass
    assert list(index.earlier_ends(len(tokens))) == occurrences(tokens, size)


@given(texts, st.integers(2, 4))
def test_ngram_index_of_successive_hash_tables_finds_every_match(
    tokens: list[int], size: int
) -> None:
    """Successive hash tables of any size act as one index."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram_index, "_BUCKETS_MIN", 2)
        index = GramIndex(tokens, size)
        for _ in tokens:
            index.add(1)
    assert list(index.earlier_ends(len(tokens))) == occurrences(tokens, size)


@given(texts, st.integers(2, 3))
def test_ngram_index_finds_true_matches_when_all_hashes_are_equal(
    tokens: list[int], size: int
) -> None:
    """Equal hashes are resolved by comparing tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram_index, "hash", lambda gram: 5, raising=False)
        index = GramIndex(tokens, size)
        while index.add(50):
            pass
        assert list(index.earlier_ends(len(tokens))) == occurrences(tokens, size)


@given(texts)
def test_drafts_of_text_indexed_at_once_equal_those_of_full_search(tokens: list[int]) -> None:
    """The match and the drafts of a text indexed at once equal those of a full search."""
    proposer = index_text(tokens)
    source, matched = search_longest_match(tokens)
    assert proposer.matched == matched
    expected = (tokens[source:] * 40)[:16] if matched else []
    assert proposer.propose(16) == expected


@given(texts, st.lists(st.integers(0, 3), max_size=60), st.integers(0, 16))
def test_drafts_continue_earlier_occurrence_after_each_new_token(
    tokens: list[int], future_tokens: list[int], count: int
) -> None:
    """Token by token, a proposal continues an earlier occurrence of a match at least as long."""
    proposer = index_text(tokens)
    for token in future_tokens:
        tokens.append(token)
        proposer.extend(8)
        drafts, matched = proposer.propose(count), proposer.matched
        assert matched >= search_longest_match(tokens)[1]
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
def test_each_generated_token_after_match_is_recorded_once_as_hit_or_miss(
    tokens: list[int], steps: list[list[int]]
) -> None:
    """Each token that drafts could have proposed is recorded once as a hit or a miss, up to the
    first miss of a step."""
    judged: list[tuple[int, bool]] = []
    proposer = index_text(tokens, judged)
    for step in steps:
        judged.clear()
        drafts, matched = proposer.propose(len(step)), proposer.matched
        tokens += step
        proposer.extend(64)
        expected = []
        for place, draft in enumerate(drafts):
            expected.append((min(MATCHED_MAX, matched + place), draft == step[place]))
            if draft != step[place]:
                break
        assert judged == expected


def test_repeated_short_phrase_gives_drafts_of_any_length() -> None:
    """Text that repeats a short phrase is proposed for any number of tokens."""
    proposer = index_text([9, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert proposer.propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_drafts_continue_latest_of_equally_long_matches() -> None:
    """Of equally long matches the latest continuation is proposed."""
    proposer = index_text([1, 2, 3, 4, 50, 1, 2, 3, 4, 60, 7, 1, 2, 3, 4])
    assert proposer.propose(2) == [60, 7]


def test_drafts_continue_longer_match_instead_of_later_shorter_one() -> None:
    """Later repetitions of a short phrase do not displace the copied passage."""
    first = [11, 12, 1, 2, 3, 4, 50, 51]
    proposer = index_text([*first, 13, 1, 2, 3, 4, 60, 61, 11, 12, 1, 2, 3, 4])
    assert proposer.propose(2) == [50, 51]


def test_drafts_continue_copied_passage_after_line_that_occurs_often() -> None:
    """A line that occurs a hundred times does not move the drafts to another passage."""
    line = [1, 2, 3, 4, 5]
    prompt = [token for number in range(100) for token in (*line, 1_000 + number)]
    tokens = prompt + prompt[: 6 * 20]
    proposer = index_text(prompt)
    assert proposer.propose(1) == [] or proposer.matched
    for token in tokens[len(prompt) :]:
        prompt.append(token)
        proposer.extend(32)
    for number in range(20, 40):
        for token in (*line, 1_000 + number):
            prompt.append(token)
            proposer.extend(32)
    assert proposer.propose(6) == [*line, 1_040]


def test_text_without_repetition_gets_no_drafts() -> None:
    """Text in which no pair of tokens repeats has no proposals."""
    assert index_text(list(range(500))).propose(5) == []
    assert index_text([]).propose(5) == []
    assert index_text([4, 4]).propose(5) == []


def test_no_drafts_are_proposed_while_last_token_is_unindexed() -> None:
    """Between a new token and the next `extend` no draft is proposed: it would be for another
    position."""
    tokens = [1, 2, 3, 1, 2]
    proposer = index_text(tokens)
    assert proposer.propose(1) == [3]
    tokens.append(3)
    assert proposer.propose(1) == []


def test_partly_indexed_prompt_gets_drafts_from_indexed_part_only() -> None:
    """A long prompt is indexed in slices; only the indexed part is searched."""
    tokens = [*range(2_000), 700, 701, 702, 703]
    proposer = NgramProposer(tokens, lambda matched, hit: None)
    slices: list[int] = []
    while is_partly_indexed(proposer):
        assert proposer.propose(2) == ([704, 705] if sum(slices) >= 702 else [])
        slices.append(proposer.extend(100))
    assert max(slices) <= 100
    assert proposer.propose(2) == [704, 705]


def test_tokens_added_many_at_once_count_as_neither_hit_nor_miss() -> None:
    """Tokens that return after a restart were not sampled one by one, so they are neither hits nor
    misses.
    """
    judged: list[tuple[int, bool]] = []
    tokens = [1, 2, 3, 4] * 5
    proposer = index_text(tokens, judged)
    tokens += [1, 2, 3, 4] * 20
    proposer.extend(1_000)
    assert judged == []
    assert proposer.propose(4) == [1, 2, 3, 4]


def worst_texts(count: int) -> dict[str, list[int]]:
    """Return texts that are expensive for an index."""
    rng = random.Random(3)
    return {
        "random": [rng.randrange(32_000) for _ in range(count)],
        "binary": [rng.randrange(2) for _ in range(count)],
        "constant": [7] * count,
        "boilerplate": ([1, 2, 3, 4, 5, 6] * count)[:count],
    }


@pytest.mark.parametrize("kind", ["random", "binary", "constant", "boilerplate"])
def test_indexing_operations_per_token_do_not_grow_with_text_length(kind: str) -> None:
    """Operations per token are bounded and no more at 40,000 tokens than at 4,000."""
    cost = {}
    for count in (4_000, 40_000):
        tokens = worst_texts(count + 400)[kind]
        known = CountingTokens(tokens[:count])
        proposer = index_text(known)
        before = known.reads
        for token in tokens[count:]:
            known.append(token)
            proposer.extend(32)
            proposer.propose(16)
        cost[count] = (known.reads - before) / 400
    assert cost[40_000] < 2 * cost[4_000] + 8
    assert cost[40_000] < 400


@pytest.mark.parametrize("kind", ["random", "binary", "constant", "boilerplate"])
def test_indexing_work_per_slice_of_long_prompt_is_bounded(kind: str) -> None:
    """No slice of a long prompt costs much more than its tokens, table growth included."""
    tokens = CountingTokens(worst_texts(40_000)[kind])
    proposer = NgramProposer(tokens, lambda matched, hit: None)
    work = [0]
    while proposer.extend(256):
        work.append(tokens.reads)
    assert max(after - before for before, after in pairwise(work)) < 256 * 2 * 8 + 1_500


@pytest.mark.parametrize("kind", ["random", "binary", "constant", "boilerplate"])
def test_ngram_index_takes_no_more_memory_than_token_list(kind: str) -> None:
    """An index takes at most the memory of the token list (8 bytes, and the numbers)."""
    proposer = index_text(worst_texts(40_000)[kind])
    assert index_bytes(proposer) < 32 * 40_000


def test_text_longer_than_window_adds_no_ngram_index_memory() -> None:
    """A text longer than the window takes no more memory than the window."""
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
                held.append(index_bytes(proposer))
            assert max(held) < 24 * 3 * 2_048
            known += known[-1_000:-990]
            proposer.extend(10)
            assert proposer.matched >= 2
