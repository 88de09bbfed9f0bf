"""Repeated receipts and wrong receipts."""

import msgspec
import pytest

from services.scheduler.events import RankMessageReceived
from shared.messages import StepFinished
from tests.unit.scheduler.support.in_memory_world import completion
from tests.unit.scheduler.support.rank_failures import query_status, restart_ranks
from tests.unit.scheduler.support.world_factory import MakeWorld


def test_repeated_step_receipt_changes_no_token_and_is_counted(make_world: MakeWorld) -> None:
    """A repeated receipt, at once or after the step has finished, changes nothing."""
    world = make_world(ranks=2)
    world.submit("a", [1, 2, 3], 5)
    first, second = world.ranks
    one = world.ranks[first].execute(world.pending_plans[first].popleft())
    world.tell(RankMessageReceived(first, one))
    world.tell(RankMessageReceived(first, one))
    world.rank_step(second)
    world.tell(RankMessageReceived(first, one))
    world.settle()
    assert world.tokens["a"] == completion([1, 2, 3], 5)
    assert query_status(world).counters["repeated_receipts_total"] == 2
    assert not world.dismissed


def _wrong_receipts(one: StepFinished) -> dict[str, StepFinished]:
    """Return receipts that contradict themselves, the plan or an earlier receipt."""
    change = msgspec.structs.replace
    return {
        "another digest": change(one, digest=b"y" * 16),
        "a step that was never planned": change(one, step_id=one.step_id + 7),
        "another rank's name": change(one, rank=1),
        "too few sequences": change(one, tokens=[]),
        "too many tokens": change(one, tokens=[[1, 2]]),
        "no token": change(one, tokens=[[]]),
        "a token of no vocabulary": change(one, tokens=[[2**31 - 1]]),
        "log probabilities without tokens": change(one, logprobs=[[], []]),
    }


WRONG_RECEIPTS = (
    "another digest",
    "a step that was never planned",
    "another rank's name",
    "too few sequences",
    "too many tokens",
    "no token",
    "a token of no vocabulary",
    "log probabilities without tokens",
)


@pytest.mark.parametrize("name", WRONG_RECEIPTS)
def test_contradictory_step_receipt_ends_epoch_and_releases_no_token(
    make_world: MakeWorld, name: str
) -> None:
    """A receipt that cannot be correct releases no token and ends the epoch; the request continues
    in the next one."""
    world = make_world(ranks=2)
    world.submit("a", [1, 2, 3], 5)
    first, second = world.ranks
    correct = world.ranks[first].execute(world.pending_plans[first].popleft())
    if name == "another digest":
        # It contradicts an earlier receipt of the same rank.
        world.tell(RankMessageReceived(first, correct))
    world.tell(RankMessageReceived(first, _wrong_receipts(correct)[name]))
    world.rank_step(second)
    assert world.tokens["a"] == []
    assert world.dismissed == [first, second]
    restart_ranks(world)
    world.settle()
    assert world.tokens["a"] == completion([1, 2, 3], 5)
