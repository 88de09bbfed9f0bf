"""Known gathers of the canary, on ranks in one process."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from services.rank_worker.canary.gathers import check_gathers
from services.rank_worker.peers.collectives import Collectives
from services.rank_worker.sampling.vocabulary import VocabularyPart
from shared.clock import SystemClock
from shared.errors import CanaryFailed
from shared.messages import CanaryFinding
from tests.mlx.sharding.in_process_exchanges import InProcessExchanges

VOCAB = 1_000


class _Rank(Collectives):
    """A rank whose gathers go through `exchange`."""

    def __init__(self, rank: int, exchange: Callable[[mx.array], mx.array]) -> None:
        super().__init__(None, rank, 3)
        self._exchange = exchange

    def gather_arrays(self, array: mx.array) -> mx.array:
        """Return the arrays of all ranks."""
        return self._exchange(array)


def _findings(
    change: Callable[[mx.array], mx.array] = lambda gathered: gathered,
) -> list[list[CanaryFinding]]:
    """Run the gathers of three ranks, all results of which are changed."""
    exchanges = InProcessExchanges()

    def run(rank: int) -> list[CanaryFinding]:
        world = _Rank(rank, lambda array: change(exchanges.gather(array)))
        vocabulary = VocabularyPart(VOCAB, rank, 3, world.gather_arrays)
        return check_gathers(world, vocabulary, SystemClock())

    return exchanges.run([lambda rank=rank: run(rank) for rank in range(3)])  # type: ignore[misc]


def test_gathers_of_candidates_and_of_a_part_pass_on_all_ranks_with_equal_digests() -> None:
    """The sizes are those of a few candidates and of one row of a part."""
    found = _findings()
    assert [(one.name, one.bytes) for one in found[0]] == [
        ("gather of 65 float32", 260),
        ("gather of 384 float32", 1_536),
    ]
    assert [[one.digest for one in rank] for rank in found] == [
        [one.digest for one in found[0]]
    ] * 3


@pytest.mark.parametrize("place", [0, 64, 130])
def test_one_wrong_number_of_a_gather_fails_the_canary(place: int) -> None:
    """All gathers still run, and the error says how many numbers are wrong."""
    with pytest.raises(CanaryFailed, match=r"known gathers over 3 ranks are wrong .*: 1 are wrong"):
        _findings(lambda gathered: gathered.at[place].add(1.0))


def test_gather_with_ranks_in_another_order_fails_the_canary() -> None:
    """The numbers of each rank differ, so their order shows."""
    with pytest.raises(CanaryFailed):
        _findings(lambda gathered: mx.roll(gathered, gathered.size // 3))
