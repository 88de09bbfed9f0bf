"""Slots, sizes of the KV arrays, and the smallest budget of all ranks."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.cache.kv_rows import RowBudget, Rows, smallest_budget
from shared.errors import InvariantBroken
from shared.identifiers import SequenceId, Slot
from shared.messages import RankReady
from tests.unit.scheduler.support.rank_messages import READY


def make_rows(tokens: int = 10_000, slots: int = 8, step: int = 64) -> Rows:
    """Return rows with a budget of `tokens` tokens of 1 byte."""
    rows = Rows(slots, step)
    rows.start(RowBudget(tokens, 1, 0))
    return rows


def test_kv_arrays_keep_shape_while_sequences_fit_in_them() -> None:
    """Sequences that join and grow within the arrays change no shape, so nothing is copied."""
    rows = make_rows()
    assert rows.resize(slots=3, tokens=100)
    shape = rows.row_count, rows.row_tokens
    assert rows.resize(slots=rows.row_count, tokens=rows.row_tokens)
    assert (rows.row_count, rows.row_tokens) == shape


def test_kv_row_growing_token_by_token_is_copied_few_times() -> None:
    """A row that grows token by token is copied a bounded number of times."""
    rows = make_rows(tokens=1_000_000)
    shapes = set()
    for tokens in range(1, 20_000):
        assert rows.resize(slots=1, tokens=tokens)
        shapes.add(rows.row_tokens)
    assert len(shapes) < 60


def test_kv_rows_are_reduced_to_one_for_single_long_sequence() -> None:
    """For a long sequence without others, the idle rows are replaced by one long row."""
    rows = make_rows(tokens=1_000_000)
    assert rows.resize(slots=3, tokens=200)
    assert rows.row_count == 4
    assert rows.resize(slots=1, tokens=100_000)
    assert (rows.row_count, rows.row_tokens >= 100_000) == (1, True)


@pytest.mark.parametrize("tokens", [600, 1_040, 2_000])
def test_spare_kv_rows_that_were_never_needed_are_not_lengthened(tokens: int) -> None:
    """After a short request, one of some length gets one row: allocating spare rows of that length
    took longer than to restore its prefix from SSD."""
    rows = make_rows(tokens=1_000_000)
    assert rows.resize(slots=1, tokens=16)
    assert rows.row_count == 4
    assert rows.resize(slots=1, tokens=tokens)
    assert (rows.row_count, rows.row_tokens >= tokens) == (1, True)
    counts = []
    for slots in range(1, 9):
        assert rows.resize(slots=slots, tokens=tokens)
        counts.append(rows.row_count)
    assert counts == [1, 2, 4, 4, 8, 8, 8, 8]


def test_kv_rows_that_were_needed_are_lengthened_with_a_growing_one() -> None:
    """Rows of short requests that come and go are kept beside one of middle length, so that they
    are not allocated again each time; in a new epoch no row has been needed yet."""
    rows = make_rows(tokens=1_000_000)
    assert rows.resize(slots=3, tokens=16)
    assert rows.resize(slots=1, tokens=1_040)
    assert rows.row_count == 3
    rows.start(rows.budget)
    assert rows.resize(slots=1, tokens=16)
    assert rows.resize(slots=1, tokens=1_040)
    assert rows.row_count == 1


def test_growing_kv_row_keeps_rows_of_short_requests_beside_it() -> None:
    """A row that grows keeps the rows of short requests that come and go."""
    rows = make_rows(tokens=4_000_000)
    shapes = set()
    for tokens in range(20_000, 120_000, 1_000):
        for slots in (1, 4, 8, 2):
            assert rows.resize(slots=slots, tokens=tokens)
            shapes.add((rows.row_count, rows.row_tokens))
    assert len(shapes) < 20


def test_long_kv_rows_become_short_when_many_short_ones_are_needed() -> None:
    """After a long sequence has ended, many short ones do not get rows of its length: allocating
    them took seconds, in which all streams paused."""
    rows = make_rows(tokens=4_000_000)
    assert rows.resize(slots=2, tokens=9_000)
    assert rows.resize(slots=2, tokens=100)
    assert rows.row_tokens >= 9_000
    assert rows.resize(slots=3, tokens=100)
    assert rows.row_tokens < 500
    assert rows.resize(slots=4, tokens=5_000)
    assert rows.resize(slots=16, tokens=4_500)
    assert rows.row_tokens >= 5_000


def test_long_unused_kv_rows_shrink_only_when_budget_is_needed() -> None:
    """Long unused rows are given up for more rows, and not earlier."""
    rows = make_rows(tokens=4_096)
    assert rows.resize(slots=1, tokens=3_000)
    assert rows.row_tokens >= 3_000
    assert rows.resize(slots=8, tokens=100)
    assert rows.row_count == 8
    assert 100 <= rows.row_tokens <= 512


def test_kv_row_resize_beyond_memory_budget_is_refused() -> None:
    """A size that does not fit is refused and leaves the arrays unchanged."""
    rows = make_rows(tokens=1_000)
    assert rows.resize(slots=2, tokens=400)
    shape = rows.row_count, rows.row_tokens
    assert not rows.resize(slots=3, tokens=400)
    assert (rows.row_count, rows.row_tokens) == shape


def test_kv_budget_fits_one_sequence_of_longest_accepted_length() -> None:
    """One sequence of the longest accepted length fits the KV budget."""
    rows = make_rows(tokens=1_000)
    assert rows.longest_sequence_tokens() == 960
    assert rows.resize(slots=1, tokens=rows.longest_sequence_tokens())


def test_release_of_slot_by_sequence_not_holding_it_raises() -> None:
    """A release by another sequence breaks an invariant."""
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
def test_free_and_held_slots_add_up_to_all_slots_after_any_operations(
    steps: list[tuple[str, int]], tokens: int
) -> None:
    """Free plus held slots are all slots after any sequence of operations (I9)."""
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


def rank_ready(budget: int, per_token: int, per_row: int = 0, drafts: int = 0) -> RankReady:
    """Return the report of a rank with this memory for KV."""
    return msgspec.structs.replace(
        READY,
        kv_bytes_per_token=per_token,
        kv_bytes_per_row=per_row,
        kv_budget_bytes=budget,
        draft_bytes_per_token=drafts,
    )


def test_kv_budget_follows_smallest_memory_when_shards_are_equal() -> None:
    """Ranks with equal shards and unequal memory get the smallest budget."""
    assert smallest_budget([rank_ready(900, 10, 3, 5), rank_ready(800, 10, 3, 5)]) == RowBudget(
        800, 10, 3, 5
    )
    assert smallest_budget([rank_ready(900, 0), rank_ready(800, 0)]) == RowBudget(800, 0, 0)


def test_rank_with_few_layers_does_not_reduce_kv_budget_of_world() -> None:
    """A rank with a small shard and little memory does not limit the others."""
    budget = smallest_budget([rank_ready(1_000, 10), rank_ready(90, 1)])
    assert budget.longest_row() == 90
    assert smallest_budget([rank_ready(1_000, 10, 7), rank_ready(50, 0)]).longest_row() == 99


@given(
    st.lists(
        st.builds(
            rank_ready,
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
def test_kv_rows_and_blocks_within_budget_fit_every_rank(
    reports: list[RankReady], rows: int, share: float
) -> None:
    """Rows, draft rows and blocks within the budget fit on every rank, however unequal the shards
    are."""
    budget = smallest_budget(reports)
    block_tokens = int(share * budget.bytes_max) // max(1, budget.bytes_per_token)
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
