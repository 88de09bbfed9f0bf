"""Slots and the shape of the KV arrays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.rows import RowBudget, Rows
from shared.errors import InvariantBroken
from shared.identifiers import SequenceId, Slot


def make_rows(tokens: int = 10_000, slots: int = 8, step: int = 64) -> Rows:
    """Return rows with a budget of `tokens` tokens of 1 byte."""
    rows = Rows(slots, step)
    rows.start(RowBudget(tokens, 1, 0))
    return rows


def test_shape_that_is_large_enough_stays() -> None:
    """Joining and growing within the arrays changes no shape, so nothing is copied."""
    rows = make_rows()
    assert rows.resize(slots=3, tokens=100)
    shape = rows.row_count, rows.row_tokens
    assert rows.resize(slots=rows.row_count, tokens=rows.row_tokens)
    assert (rows.row_count, rows.row_tokens) == shape


def test_growth_is_geometric() -> None:
    """A row that grows token by token is copied a bounded number of times."""
    rows = make_rows(tokens=1_000_000)
    shapes = set()
    for tokens in range(1, 20_000):
        assert rows.resize(slots=1, tokens=tokens)
        shapes.add(rows.row_tokens)
    assert len(shapes) < 60


def test_shrinks_only_when_something_else_would_not_fit() -> None:
    """Long rows that nobody needs are given up for more rows, not before."""
    rows = make_rows(tokens=4_096)
    assert rows.resize(slots=1, tokens=3_000)
    assert rows.row_tokens >= 3_000
    assert rows.resize(slots=8, tokens=100)
    assert rows.row_count == 8
    assert 100 <= rows.row_tokens <= 512


def test_no_shape_beyond_the_budget() -> None:
    """What does not fit is refused and leaves the arrays as they are."""
    rows = make_rows(tokens=1_000)
    assert rows.resize(slots=2, tokens=400)
    shape = rows.row_count, rows.row_tokens
    assert not rows.resize(slots=3, tokens=400)
    assert (rows.row_count, rows.row_tokens) == shape


def test_longest_row_fits_alone() -> None:
    """The longest sequence that is accepted can always run by itself."""
    rows = make_rows(tokens=1_000)
    assert rows.longest() == 960
    assert rows.resize(slots=1, tokens=rows.longest())


def test_giving_back_what_is_not_held_is_our_bug() -> None:
    """A slot is freed by its holder only."""
    rows = make_rows()
    rows.resize(slots=1, tokens=1)
    slot = rows.take(SequenceId(1))
    with pytest.raises(InvariantBroken):
        rows.give_back(slot, SequenceId(2))


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "free", "compact"]), st.integers(0, 7)), max_size=60
    ),
    st.integers(64, 5_000),
)
def test_slots_are_never_lost_or_doubled(steps: list[tuple[str, int]], tokens: int) -> None:
    """Free plus held slots are all slots, whatever happens (invariant I9)."""
    rows = make_rows(tokens=tokens)
    held: dict[Slot, SequenceId] = {}
    for number, (what, which) in enumerate(steps):
        if what == "take" and rows.has_free_slot:
            slots = max(rows.rows_needed(), rows.lowest_free() + 1)
            if rows.resize(slots=slots, tokens=32):
                held[rows.take(SequenceId(number))] = SequenceId(number)
        elif what == "free" and held:
            slot = sorted(held)[which % len(held)]
            rows.give_back(slot, held.pop(slot))
        elif what == "compact":
            for move in rows.compact():
                old = next(s for s, owner in held.items() if owner == move.sequence_id)
                held[Slot(move.slot)] = held.pop(old)
            assert sorted(held) == list(range(len(held)))
        rows.check_invariants(held)
