"""Receipts that come twice, and receipts that lie."""

import msgspec
import pytest

from services.scheduler.events import RankMessageReceived
from shared.messages import StepFinished
from tests.unit.scheduler.in_memory_world import completion
from tests.unit.scheduler.rank_failures import query_status, restart_ranks
from tests.unit.scheduler.world_factory import MakeWorld


def test_a_receipt_that_comes_twice_is_ignored_and_counted(make_world: MakeWorld) -> None:
    """The same answer again, at once or after the step was finished, changes nothing."""
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


def _lies(one: StepFinished) -> dict[str, StepFinished]:
    """Return receipts that contradict themselves, the plan, or what was said before."""
    change = msgspec.structs.replace
    return {
        "another digest": change(one, digest=b"y" * 16),
        "a step that was never planned": change(one, step_id=one.step_id + 7),
        "another rank's name": change(one, rank=1),
        "too few sequences": change(one, tokens=[]),
        "too many tokens": change(one, tokens=[[1, 2]]),
        "no token": change(one, tokens=[[]]),
        "a token of no vocabulary": change(one, tokens=[[2**31 - 1]]),
        "log probabilities of nobody": change(one, logprobs=[[], []]),
    }


LIES = (
    "another digest",
    "a step that was never planned",
    "another rank's name",
    "too few sequences",
    "too many tokens",
    "no token",
    "a token of no vocabulary",
    "log probabilities of nobody",
)


@pytest.mark.parametrize("lie", LIES)
def test_a_receipt_that_lies_ends_the_epoch(make_world: MakeWorld, lie: str) -> None:
    """What cannot be true releases no token; the epoch ends, and the request goes on after."""
    world = make_world(ranks=2)
    world.submit("a", [1, 2, 3], 5)
    first, second = world.ranks
    true = world.ranks[first].execute(world.pending_plans[first].popleft())
    if lie == "another digest":
        # After a true one it is a contradiction, whoever may agree with it.
        world.tell(RankMessageReceived(first, true))
    world.tell(RankMessageReceived(first, _lies(true)[lie]))
    world.rank_step(second)
    assert world.tokens["a"] == []
    assert world.dismissed == [first, second]
    restart_ranks(world)
    world.settle()
    assert world.tokens["a"] == completion([1, 2, 3], 5)
