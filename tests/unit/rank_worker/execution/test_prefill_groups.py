"""Groups of prefill chunks that share a forward."""

import pytest

from services.rank_worker.batch.prefill_groups import (
    CONCATENATED_MAX,
    PADDING_SHARE_MAX,
    concatenate_groups,
    group_chunks,
    padded_width,
)
from services.rank_worker.device.execution_profile import GROUPED_TOKENS_MAX
from shared import limits
from shared.messages import PrefillChunk


def _whole(sequence_id: int, length: int) -> PrefillChunk:
    return PrefillChunk(sequence_id=sequence_id, start=0, length=length, samples=True)


def test_prefill_groups_contain_each_chunk_exactly_once() -> None:
    """The groups hold every chunk exactly once."""
    chunks = [_whole(i, 1 + i * i * 37 % 700) for i in range(40)]

    got = [one.sequence_id for group in group_chunks(chunks, GROUPED_TOKENS_MAX) for one in group]

    assert sorted(got) == list(range(40))


def test_prefill_groups_are_padded_by_at_most_an_eighth() -> None:
    """At most an eighth of a group is padding."""
    chunks = [_whole(i, 1 + i * i * 37 % 700) for i in range(40)]

    groups = group_chunks(chunks, GROUPED_TOKENS_MAX)

    assert any(len(group) > 1 for group in groups)
    for group in groups:
        area = max(one.length for one in group) * len(group)
        assert sum(one.length for one in group) >= (1.0 - PADDING_SHARE_MAX) * area
        assert len(group) == 1 or area <= GROUPED_TOKENS_MAX * len(group)


def test_prompts_of_equal_length_share_one_prefill_group() -> None:
    """Prompts of one length share a forward, in plan order."""
    chunks = [_whole(i, 20) for i in range(5)]

    assert group_chunks(chunks, GROUPED_TOKENS_MAX) == [chunks]


def test_prefill_group_never_exceeds_tokens_of_one_forward() -> None:
    """A group never exceeds the tokens of one forward."""
    chunks = [_whole(i, 500) for i in range(32)]

    groups = group_chunks(chunks, GROUPED_TOKENS_MAX)

    assert max(len(group) for group in groups) == limits.FORWARD_TOKENS_MAX // 500
    assert [one for group in groups for one in group] == chunks


def test_partial_or_long_prefill_chunk_is_not_grouped_with_others() -> None:
    """A chunk that is only a part of its prompt, or long, is in a group of its own."""
    chunks = [
        PrefillChunk(sequence_id=1, start=0, length=20, samples=False),
        PrefillChunk(sequence_id=2, start=5, length=20, samples=True),
        _whole(3, GROUPED_TOKENS_MAX + 1),
        _whole(4, GROUPED_TOKENS_MAX + 1),
    ]

    assert group_chunks(chunks, GROUPED_TOKENS_MAX) == [[one] for one in chunks]
    assert group_chunks([], GROUPED_TOKENS_MAX) == []


def test_prefill_lengths_are_padded_to_25_widths_with_little_padding() -> None:
    """Lengths are padded to one of 25 widths, with at most a fifth of padding in wide ones."""
    longest = limits.FORWARD_TOKENS_MAX * 9 // 8
    lengths = range(2, longest + 1)
    widths = {length: padded_width(length) for length in lengths}

    assert len(set(widths.values())) == 25
    assert all(length <= widths[length] <= longest for length in lengths)
    assert all(widths[length] - length < max(16, length / 4) for length in lengths)
    assert all(padded_width(width) == width for width in widths.values())
    assert padded_width(1) == 1, "one token is computed like a decode"


@pytest.mark.parametrize("length", [8, 10, 40, 65, 129, 300])
def test_prefill_group_with_padding_never_exceeds_tokens_of_one_forward(length: int) -> None:
    """Groups never exceed the tokens of one forward, padding included."""
    chunks = [_whole(i, length) for i in range(300)]

    groups = group_chunks(chunks, GROUPED_TOKENS_MAX, lambda one: padded_width(one.length))

    areas = [len(group) * padded_width(length) for group in groups]
    assert max(areas) <= limits.FORWARD_TOKENS_MAX
    assert max(areas) > limits.FORWARD_TOKENS_MAX // 2, "no forward is shared"
    assert sum(map(len, groups)) == 300


def test_chunks_that_are_alone_stand_side_by_side_up_to_the_tokens_of_one_forward() -> None:
    """Every group is in one forward; those of several chunks have one of their own, and two chunks
    of a sequence are in two.
    """
    lengths = [900, 700, 100, 400, 2_100, 30, 1_500, 300]
    alone = [
        [PrefillChunk(sequence_id=i, start=5, length=one, samples=False)]
        for i, one in enumerate(lengths)
    ]
    together = [_whole(20, 30), _whole(21, 30)]

    forwards = concatenate_groups([*alone[:3], together, *alone[3:]], lambda one: one.length)

    kinds = ["side by side", "rows", *["side by side"] * 3]
    assert [one.kind for one in forwards] == kinds
    chunks = [one for (one,) in alone]
    expected = [chunks[:3], together, chunks[3:4], chunks[4:5], chunks[5:]]
    assert [one.chunks for one in forwards] == expected
    again = [
        [PrefillChunk(sequence_id=1, start=start, length=9, samples=False)] for start in (0, 9)
    ]
    apart = concatenate_groups(again, lambda one: one.length)
    assert [one.chunks for one in apart] == again
    many = [[_whole(i, 1)] for i in range(CONCATENATED_MAX + 1)]
    forwards = concatenate_groups(many, lambda one: one.length)
    assert [len(one.chunks) for one in forwards] == [CONCATENATED_MAX, 1]
