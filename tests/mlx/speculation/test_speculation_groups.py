"""Groups of decode rows that share a forward, and acceptance of drafts."""

import random
from collections.abc import Iterator

import pytest

from services.rank_worker.batch.decode_groups import forward_cost_of, group_decode_rows
from services.rank_worker.sampling.draft_acceptance import count_accepted


def _partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    first, rest = rows[0], rows[1:]
    for others in _partitions(rest):
        yield [[first], *others]
        for place in range(len(others)):
            yield [*others[:place], [first, *others[place]], *others[place + 1 :]]


def _cost(groups: list[list[int]], slots: list[int], counts: list[int], forward: int) -> int:
    total = 0
    for group in groups:
        rows = 1 if len(group) == 1 else max(slots[index] for index in group) + 1
        total += forward + rows * max(counts[index] for index in group)
    return total


@pytest.mark.parametrize("forward_cost_tokens", [1, 4, 12, 64])
def test_groups_of_rows_cost_at_most_25_percent_or_forward_over_optimum(
    forward_cost_tokens: int,
) -> None:
    """Groups hold each row once and cost at most 25 % or one forward more than the best split."""
    chance = random.Random(forward_cost_tokens)
    for _ in range(60):
        slots = sorted(chance.sample(range(8), chance.randint(1, 6)))
        counts = [1 + chance.choice([0, 0, 1, 3, 8, 16]) for _ in slots]
        groups = group_decode_rows(slots, counts, forward_cost_tokens)

        assert sorted(index for group in groups for index in group) == list(range(len(slots)))
        assert all(group == sorted(group) for group in groups)
        cost = _cost(groups, slots, counts, forward_cost_tokens)
        least = min(
            _cost(one, slots, counts, forward_cost_tokens)
            for one in _partitions(list(range(len(slots))))
        )
        # Only rows of neighbouring lengths are grouped, and small padding is ignored.
        assert least <= cost <= max(1.25 * least, least + forward_cost_tokens)


def test_row_with_drafts_gets_own_forward_when_padding_costs_more() -> None:
    """Rows of one token are not padded to nine where another forward costs less."""
    slots = list(range(16))
    counts = [1] * 16
    counts[5] = 9

    assert group_decode_rows(slots, counts, 12) == [[5], [*range(5), *range(6, 16)]]
    assert group_decode_rows(slots, counts, 256) == [slots]
    assert group_decode_rows(slots, [4] * 16, 1) == [slots]
    assert group_decode_rows([3], [17], 1) == [[0]]


def test_estimated_forward_cost_is_equal_on_ranks_with_different_devices() -> None:
    """With several ranks the cost of a forward does not depend on the device of the rank."""
    for backend in ("ring", "nccl", "jaccl"):
        assert forward_cost_of(backend, on_cpu=True) == forward_cost_of(backend, on_cpu=False)
    assert forward_cost_of("off", on_cpu=True) < forward_cost_of("off", on_cpu=False)


def test_drafts_are_accepted_up_to_first_mismatch() -> None:
    """Drafts after the first one that differs are not accepted."""
    assert count_accepted([], [5]) == 0
    assert count_accepted([5, 6, 7], [5, 6, 7, 8]) == 3
    assert count_accepted([5, 6, 7], [5, 9, 7, 8]) == 1
    assert count_accepted([5, 6], [4, 6, 7, 5]) == 0
