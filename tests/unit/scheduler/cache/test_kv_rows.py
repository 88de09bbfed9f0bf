"""Slots and the shape of the KV arrays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.cache.kv_rows import RowBudget, Rows, smallest_budget
from shared.errors import InvariantBroken
from shared.identifiers import SequenceId, Slot
from shared.messages import RankReady


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


def test_idle_rows_do_not_become_long_with_the_others() -> None:
    """Short requests leave rows for more of them; a long text that comes alone pays for one."""
    rows = make_rows(tokens=1_000_000)
    assert rows.resize(slots=3, tokens=200)
    assert rows.row_count == 4
    assert rows.resize(slots=1, tokens=100_000)
    assert (rows.row_count, rows.row_tokens >= 100_000) == (1, True)


def test_who_comes_and_goes_beside_a_long_text_is_not_paid_for_again() -> None:
    """A row that grows keeps those of helpers that may come back."""
    rows = make_rows(tokens=4_000_000)
    shapes = set()
    for tokens in range(20_000, 120_000, 1_000):
        for slots in (1, 4, 8, 2):
            assert rows.resize(slots=slots, tokens=tokens)
            shapes.add((rows.row_count, rows.row_tokens))
    assert len(shapes) < 20


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
    assert rows.longest_sequence_tokens() == 960
    assert rows.resize(slots=1, tokens=rows.longest_sequence_tokens())


def test_giving_back_what_is_not_held_is_our_bug() -> None:
    """A slot is freed by its holder only."""
    rows = make_rows()
    rows.resize(slots=1, tokens=1)
    slot = rows.assign_slot(SequenceId(1))
    with pytest.raises(InvariantBroken):
        rows.release_slot(slot, SequenceId(2))


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
            slots = max(rows.rows_needed(), rows.lowest_free_slot() + 1)
            if rows.resize(slots=slots, tokens=32):
                held[rows.assign_slot(SequenceId(number))] = SequenceId(number)
        elif what == "free" and held:
            slot = sorted(held)[which % len(held)]
            rows.release_slot(slot, held.pop(slot))
        elif what == "compact":
            for move in rows.compact():
                old = next(s for s, owner in held.items() if owner == move.sequence_id)
                held[Slot(move.slot)] = held.pop(old)
            assert sorted(held) == list(range(len(held)))
        rows.check_invariants(held)


def ready(budget: int, per_token: int, per_row: int = 0, drafts: int = 0) -> RankReady:
    """Return what a rank with so many bytes for KV says of itself."""
    return RankReady(
        rank=0,
        model_fingerprint="f",
        kv_bytes_per_token=per_token,
        kv_bytes_per_row=per_row,
        kv_budget_bytes=budget,
        context_tokens_max=100,
        vocab_size=10,
        can_roll_back=True,
        draft_bytes_per_token=drafts,
        blas="",
    )


def test_alike_ranks_have_the_budget_of_the_poorest() -> None:
    """Equal parts of the model, unequal memory."""
    assert smallest_budget([ready(900, 10, 3, 5), ready(800, 10, 3, 5)]) == RowBudget(800, 10, 3, 5)
    assert smallest_budget([ready(900, 0), ready(800, 0)]) == RowBudget(800, 0, 0)


def test_a_rank_with_little_of_the_model_counts_for_little() -> None:
    """Nine tokens of ten bytes here, ninety of one byte there: what is counted as ten is one."""
    budget = smallest_budget([ready(1_000, 10), ready(90, 1)])
    assert budget.longest_row() == 90
    assert smallest_budget([ready(1_000, 10, 7), ready(50, 0)]).longest_row() == 99


@given(
    st.lists(
        st.builds(
            ready,
            st.integers(1, 10_000),
            st.integers(0, 50),
            st.integers(0, 200),
            st.integers(0, 30),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 8),
    st.floats(0.0, 1.0),
)
def test_what_keeps_to_the_budget_fits_on_every_rank(
    reports: list[RankReady], rows: int, part: float
) -> None:
    """Rows, drafts in them and blocks beside them, however unequally ranks share the model."""
    budget = smallest_budget(reports)
    block_tokens = int(part * budget.bytes_max) // max(1, budget.bytes_per_token)
    blocks = block_tokens * budget.bytes_per_token
    left = (budget.bytes_max - blocks) // rows - budget.bytes_per_row
    if left < 0:
        return
    tokens = left // max(1, budget.row_bytes_per_token)
    assert budget.row_bytes(rows, tokens) + blocks <= budget.bytes_max
    for one in reports:
        per_token = one.kv_bytes_per_token + one.draft_bytes_per_token
        taken = rows * (tokens * per_token + one.kv_bytes_per_row)
        assert taken + block_tokens * one.kv_bytes_per_token <= one.kv_budget_bytes
