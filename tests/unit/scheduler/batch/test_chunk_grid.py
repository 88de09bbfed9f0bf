"""Chunk ends on the grid, without a scheduler."""

import pytest

from services.scheduler.batch import chunk_grid
from shared import limits


@pytest.mark.parametrize(
    ("tokens", "length"),
    [(1, 1), (2, 2), (3, 3), (5, 4), (16, 16), (31, 24), (700, 512), (800, 768), (2_048, 2_048)],
)
def test_chunk_from_start_of_prompt_has_power_of_two_or_one_and_half(
    tokens: int, length: int
) -> None:
    """At the start of a prompt a chunk has 2^n or 3 * 2^n tokens."""
    assert chunk_grid.round_down(tokens) == length


def test_chunk_from_position_off_grid_ends_on_grid() -> None:
    """After a cached prefix whose length is off the grid, the first chunk ends on the grid."""
    length = chunk_grid.round_down(1_000, 77)

    assert length == 1_024 - 77
    assert chunk_grid.round_down(1_000, 77 + length) == 768


def test_chunk_keeps_more_than_half_of_its_budget_and_never_exceeds_it() -> None:
    """Wherever it starts, a chunk keeps more than half of its budget and never exceeds it."""
    for tokens in (*range(1, 130), 255, 256, 1_000, limits.FORWARD_TOKENS_MAX):
        for position in (*range(70), 1_023, 30_000):
            assert tokens / 2 < chunk_grid.round_down(tokens, position) <= tokens


def test_chunk_of_half_more_tokens_is_longer() -> None:
    """A budget that grows by half gives a longer chunk, so that chunks never stop growing."""
    for exponent in range(4, 11):
        for length in (2**exponent, 3 * 2 ** (exponent - 1)):
            assert chunk_grid.round_down(length * 3 // 2) > length
