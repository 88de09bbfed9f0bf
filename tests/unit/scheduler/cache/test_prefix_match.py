"""Prefix matches by example."""

import pytest

from services.scheduler.cache.index.block_index import BlockIndex
from tests.unit.scheduler.cache.index_builder import find_prefix, keep_blocks, keep_checkpoint

TEXT = list(range(100, 150))


@pytest.mark.parametrize(
    ("prompt", "tokens", "diverged_at"),
    [
        ([*TEXT, 1, 2, 3], 50, None),
        (TEXT, 49, None),
        (TEXT[:48], 47, None),
        (TEXT[:49], 48, None),
        (TEXT[:20], 19, None),
        ([*TEXT[:37], 1, 2], 37, 37),
        ([*TEXT[:48], 1, 2], 48, 48),
        ([*TEXT[:49], 1, 2], 49, 49),
        ([*TEXT[:32], 1, 2], 32, 32),
        ([1, *TEXT], 0, None),
        (TEXT[:1], 0, None),
    ],
)
def test_prompt_matches_longest_known_prefix_without_its_last_token(
    prompt: list[int], tokens: int, diverged_at: int | None
) -> None:
    """All leading tokens of a known sequence are reused, except the prompt's last token."""
    index = BlockIndex()
    keep_blocks(index, TEXT)
    found = find_prefix(index, prompt)
    assert (found.tokens, found.diverged_at) == (tokens, diverged_at)


def test_prompt_matches_longest_of_1000_known_continuations() -> None:
    """Of 1,000 continuations the one with the longest common prefix is found."""
    index = BlockIndex()
    for number in range(1_000):
        keep_blocks(index, [*range(16), *(int(digit) for digit in f"{number:03}"), 77, 78])
    for number in (0, 7, 456, 999):
        digits = [int(digit) for digit in f"{number:03}"]
        assert find_prefix(index, [*range(16), *digits, 77, 5]).tokens == 20
        assert find_prefix(index, [*range(16), *digits, 5]).tokens == 19
        assert find_prefix(index, [*range(16), *digits[:2], 50]).tokens == 18


def test_prefix_match_reports_evicted_blocks_without_reusing_them() -> None:
    """An evicted entry shows that a prefix was known and where it is gone."""
    index = BlockIndex()
    nodes = keep_blocks(index, TEXT)
    for node in reversed(nodes[1:]):
        index.set_resident(node.block, resident=False)
    found = find_prefix(index, [*TEXT, 1])
    assert (found.tokens, found.whole_blocks, found.shared_tokens) == (16, 1, 50)


def test_prefix_match_of_recurrent_model_ends_at_checkpoint() -> None:
    """A model whose rows have recurrent state reuses a prefix only up to a block with a
    checkpoint."""
    index = BlockIndex()
    nodes = keep_blocks(index, TEXT, tail=False)
    assert find_prefix(index, [*TEXT, 1], states=True).tokens == 0
    keep_checkpoint(index, nodes[0])
    state = keep_checkpoint(index, nodes[2])
    found = find_prefix(index, [*TEXT, 1], states=True)
    assert (found.tokens, found.checkpoint) == (48, state)
    assert find_prefix(index, TEXT[:48], states=True).tokens == 16, "one token is left to compute"
    assert find_prefix(index, [*TEXT[:40], 1], states=True).tokens == 16


def test_prompt_matches_no_block_of_other_cache_salt() -> None:
    """In 1,000 tries with another salt no token is found."""
    index = BlockIndex()
    for number in range(20):
        keep_blocks(index, [number] * 50, "mine")
    for number in range(1_000):
        found = find_prefix(index, [number % 20] * 60, f"salt {number}")
        assert (found.tokens, found.shared_tokens, found.diverged_at) == (0, 0, None)
    assert find_prefix(index, [3] * 60, "mine").tokens == 50
