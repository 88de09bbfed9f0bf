"""The core as a whole: tokens, ends, aborts, recovery, refusals."""

import dataclasses
from typing import Any

import msgspec
import pytest

from services.scheduler.events import (
    DrainRequested,
    GatewayLost,
    RankLost,
    RankMessageReceived,
    TimePassed,
)
from shared.identifiers import PeerId
from shared.messages import RankFailed, RequestFailed, RequestFinished, RequestRejected
from tests.unit.scheduler.in_memory_world import GATEWAY, VOCABULARY, InMemoryWorld, completion
from tests.unit.scheduler.world_factory import MakeWorld


def finish(world: InMemoryWorld, request_id: str) -> RequestFinished:
    """Return how a request finished, or fail with what happened instead."""
    end = world.ends[request_id]
    assert isinstance(end, RequestFinished), end
    return end


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_tokens_are_those_of_an_undisturbed_run(
    make_world: MakeWorld, ranks: int, plans_in_flight: int
) -> None:
    """Each request gets exactly its own tokens, in order, whatever runs beside it."""
    world = make_world(ranks=ranks, plans_in_flight=plans_in_flight)
    prompts = {f"r{i}": list(range(1, 5 + 37 * i)) for i in range(6)}
    for request_id, prompt in prompts.items():
        world.submit(request_id, prompt, 20)
    world.settle()
    for request_id, prompt in prompts.items():
        assert world.tokens[request_id] == completion(prompt, 20)
        end = finish(world, request_id)
        assert (end.finish_reason, end.completion_tokens) == ("length", 20)


def test_stop_token_is_sent_and_ends_the_request(make_world: MakeWorld) -> None:
    """A stop id ends the completion at once; the token of the plan in flight goes nowhere."""
    world = make_world()
    prompt = [1, 2, 3]
    stop = completion(prompt, 8)[5]
    world.submit("a", prompt, 100, stop_ids=[stop])
    world.settle()
    assert world.tokens["a"] == completion(prompt, 100, (stop,))
    assert finish(world, "a").finish_reason == "stop"


def test_two_plans_are_in_flight(make_world: MakeWorld) -> None:
    """While one step runs the next plan is already at the ranks, so the device need not wait."""
    world = make_world()
    world.submit("a", [1, 2, 3], 10)
    peer = next(iter(world.ranks))
    assert len(world.pending_plans[peer]) == 2
    assert world.pending_plans[peer][1].decodes
    world.settle()


def test_no_token_leaves_before_all_receipts_agree(make_world: MakeWorld) -> None:
    """With one receipt of two nothing is sent; with both the token is (invariant I6)."""
    world = make_world(ranks=2)
    world.submit("a", [1, 2, 3], 4)
    first, second = world.ranks
    world.rank_step(first)
    assert world.tokens["a"] == []
    world.rank_step(second)
    assert len(world.tokens["a"]) == 1
    world.settle()


def test_differing_receipts_end_the_epoch_and_leave_evidence(make_world: MakeWorld) -> None:
    """Unequal digests: no token of that step leaves, all ranks go, the request continues after."""
    world = make_world(ranks=2)
    world.submit("a", [1, 2, 3], 6)
    world.step()
    sent = list(world.tokens["a"])
    world.change_receipt = lambda receipt: (
        msgspec.structs.replace(receipt, digest=b"x" * 16) if receipt.rank == 1 else receipt
    )
    world.step()
    assert world.tokens["a"] == sent
    assert len(world.evidence) == 1
    assert len(world.dismissed) == 2
    world.change_receipt = lambda receipt: receipt
    for rank in range(2):
        world.start_rank(rank)
    world.settle()
    assert world.tokens["a"] == completion([1, 2, 3], 6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_lost_rank_is_a_pause(make_world: MakeWorld, ranks: int) -> None:
    """A rank lost at any step: after it is back every stream goes on, nothing twice or missing."""
    for lost_after in range(12):
        world = make_world(ranks=ranks)
        for index in range(3):
            world.submit(f"r{index}", [index, 7, 9], 8)
        for _ in range(lost_after):
            world.step()
        victim = list(world.ranks)[-1]
        world.ranks.pop(victim)
        world.tell(RankLost(victim, "killed"))
        assert not world.ranks, "all ranks of an ended epoch are told to leave"
        for rank in range(ranks):
            world.start_rank(rank)
        world.settle()
        for index in range(3):
            assert world.tokens[f"r{index}"] == completion([index, 7, 9], 8)


def test_step_deadline_ends_the_epoch(make_world: MakeWorld) -> None:
    """A step that never finishes is noticed by the scheduler's own clock."""
    world = make_world()
    world.submit("a", [1, 2], 3)
    world.advance(59.0)
    assert not world.dismissed
    world.advance(2.0)
    assert world.dismissed
    world.start_rank(0)
    world.settle()
    assert world.tokens["a"] == completion([1, 2], 3)


def test_permanent_failure_ends_all_requests(make_world: MakeWorld) -> None:
    """When starting again cannot help, requests fail with the reason instead of waiting."""
    world = make_world()
    world.submit("a", [1, 2], 3)
    peer = next(iter(world.ranks))
    failed = RankFailed(rank=0, epoch=1, detail="The weights are gone.", permanent=True)
    world.tell(RankMessageReceived(peer, failed))
    end = world.ends["a"]
    assert isinstance(end, RequestFailed)
    assert end.detail == "The weights are gone."
    world.submit("b", [1], 1)
    refused = world.ends["b"]
    assert isinstance(refused, RequestRejected)
    assert refused.cause == "not_ready"


def test_abort_at_every_step_and_twice(make_world: MakeWorld) -> None:
    """An abort in queue, prefill, decode or at the end ends once; its neighbour is untouched."""
    for aborted_after in range(8):
        world = make_world(running_sequences_max=1 if aborted_after == 0 else 4)
        world.submit("keep", [4, 4, 4], 6)
        world.submit("drop", [5, 5, 5], 6)
        for _ in range(aborted_after):
            world.step()
        world.abort("drop")
        world.abort("drop")
        world.settle()
        expected = completion([5, 5, 5], 6)
        assert world.tokens["drop"] == expected[: len(world.tokens["drop"])]
        reason = finish(world, "drop").finish_reason
        assert reason == ("length" if len(world.tokens["drop"]) == 6 else "abort")
        assert world.tokens["keep"] == completion([4, 4, 4], 6)
        assert not any(rank.rows for rank in world.ranks.values()), "every row is given back"


def test_lost_gateway_frees_its_work(make_world: MakeWorld) -> None:
    """What a dead gateway owned is ended; the ranks drop its rows. One that has come back under the
    same name would take a word about it for the end of what it has submitted again."""
    world = make_world()
    world.submit("a", [1, 2, 3], 1_000)
    world.step()
    world.tell(GatewayLost(GATEWAY, "gone"))
    world.settle()
    assert "a" not in world.ends
    assert len(world.core._requests) == 0
    assert not any(rank.rows for rank in world.ranks.values())


def test_preemption_when_kv_runs_out(make_world: MakeWorld) -> None:
    """Rows that do not fit: the youngest goes back to the queue and finishes later, unchanged."""
    world = make_world(kv_tokens=1_024, kv_row_growth_tokens=64)
    prompts = {f"r{i}": [i + 1] * 100 for i in range(6)}
    for request_id, prompt in prompts.items():
        world.submit(request_id, prompt, 200)
    world.settle()
    for request_id, prompt in prompts.items():
        assert world.tokens[request_id] == completion(prompt, 200)
    assert world.status is not None
    world.now_s += 2.0
    world.tell(TimePassed())
    assert world.status.counters["preemptions_total"] > 0


@pytest.mark.parametrize("method", ["off", "ngram"])
@pytest.mark.parametrize("stays", [0, 3])
def test_a_long_text_takes_no_long_rows_for_those_that_left(
    make_world: MakeWorld, stays: int, method: str
) -> None:
    """Four short requests run, three end; the fourth moves down, and there are rows for two."""
    world = make_world(speculation={"method": method})
    lengths = {i: 400 if i == stays else 3 for i in range(4)}
    prompts = {f"r{i}": [i + 1] * 20 for i in lengths}
    for i, length in lengths.items():
        world.submit(f"r{i}", prompts[f"r{i}"], length)
    while len(world.ends) < 3:
        assert world.step()
    assert world.plans[-1].row_count == 4
    text = [7 * place % VOCABULARY for place in range(4_000)]
    world.submit("long", text, 30)
    world.settle()

    assert [plan.row_count for plan in world.plans if plan.row_tokens > 4_000][:1] == [2]
    assert world.tokens["long"] == completion(text, 30)
    for i, length in lengths.items():
        assert world.tokens[f"r{i}"] == completion(prompts[f"r{i}"], length)


def test_priority_goes_first(make_world: MakeWorld) -> None:
    """A request of higher priority is admitted before earlier ones; equals keep their order."""
    world = make_world(running_sequences_max=1)
    world.submit("running", [1], 5)
    world.submit("first", [2], 1)
    world.submit("second", [3], 1)
    world.submit("urgent", [4], 1, priority=5)
    world.settle()
    assert list(world.ends) == ["running", "urgent", "first", "second"]


def test_submit_is_idempotent_and_resumes(make_world: MakeWorld) -> None:
    """A repeated submit changes nothing; one with `generated` goes on at that position."""
    world = make_world()
    whole = completion([9, 8], 10)
    world.tokens["a"] = whole[:4]
    world.submit("a", [9, 8], 10, generated=whole[:4])
    world.submit("a", [9, 8], 10, generated=whole[:4])
    world.settle()
    assert world.tokens["a"] == whole
    assert finish(world, "a").completion_tokens == 10


def test_resumed_request_that_was_complete(make_world: MakeWorld) -> None:
    """A gateway that resubmits after the last token gets the end, and no further token."""
    world = make_world()
    whole = completion([9, 8], 3)
    world.tokens["a"], world.tokens["b"] = list(whole), list(whole)
    world.submit("a", [9, 8], 3, generated=whole)
    world.submit("b", [9, 8], 9, generated=whole, stop_ids=[whole[-1]])
    world.settle()
    assert finish(world, "a").finish_reason == "length"
    assert finish(world, "b").finish_reason == "stop"
    assert world.tokens["a"] == whole


@dataclasses.dataclass
class Refused:
    """One request that cannot be served, and the cause that it is given."""

    cause: str
    prompt: list[int]
    options: dict[str, Any]


@pytest.mark.parametrize(
    "case",
    [
        Refused("too_long", [1] * 100, {}),
        Refused("invalid", [1, 2, VOCABULARY], {}),
        Refused("too_long", [1], {"generated": [1, 2, 3, 4, 5, 6]}),
    ],
)
def test_what_cannot_be_served_is_rejected(make_world: MakeWorld, case: Refused) -> None:
    """A request that can never fit is rejected with the numbers, before anything is computed."""
    world = make_world(context=100)
    world.submit("a", case.prompt, 5, **case.options)
    end = world.ends["a"]
    assert isinstance(end, RequestRejected)
    assert end.cause == case.cause
    assert any(character.isdigit() for character in end.detail)
    assert not world.plans


def test_context_ends_with_length(make_world: MakeWorld) -> None:
    """A completion stops where the context ends, with finish reason `length`."""
    world = make_world(context=50)
    world.submit("a", [1] * 40, 100)
    world.settle()
    assert len(world.tokens["a"]) == 10
    assert finish(world, "a").finish_reason == "length"


def test_full_queue_says_when_to_come_back(make_world: MakeWorld) -> None:
    """One more than the queue holds is refused with a retry time from 1 to 120 s."""
    world = make_world(running_sequences_max=1, waiting_requests_max=2)
    for index in range(5):
        world.submit(f"r{index}", [index], 3)
    refused = [end for end in world.ends.values() if isinstance(end, RequestRejected)]
    assert refused
    assert all(end.cause == "queue_full" for end in refused)
    assert all(1.0 <= (end.retry_after_s or 0.0) <= 120.0 for end in refused)
    world.settle()


def test_retry_time_follows_how_long_requests_run(make_world: MakeWorld) -> None:
    """Requests that run for long make the retry time longer."""
    times = []
    for seconds in (0.1, 10.0):
        world = make_world(running_sequences_max=1, waiting_requests_max=1)
        for index in range(20):
            world.submit(f"r{index}", [index], 2)
            world.step()
            world.now_s += seconds
            world.settle()
        for name in "abc":
            world.submit(name, [1], 2)
        end = world.ends["c"]
        assert isinstance(end, RequestRejected)
        times.append(end.retry_after_s or 0.0)
        world.settle()
    assert times[0] == 1.0
    assert times[1] > 5.0


def test_request_deadline(make_world: MakeWorld) -> None:
    """A request that is not finished in time fails, waiting or running."""
    world = make_world(running_sequences_max=1)
    world.submit("a", [1], 5_000, deadline_s=5.0)
    world.submit("b", [2], 5_000, deadline_s=5.0)
    for _ in range(5):
        world.step()
    world.now_s += 6.0
    world.tell(TimePassed())
    for name in "ab":
        end = world.ends[name]
        assert isinstance(end, RequestFailed)
        assert (end.cause, end.detail) == ("deadline", "Not finished within 5 s.")
    world.settle()


def test_drain_finishes_what_runs(make_world: MakeWorld) -> None:
    """After the order to drain running requests finish, new ones are refused, then all stops."""
    world = make_world()
    world.submit("a", [1], 20)
    world.step()
    world.tell(DrainRequested())
    world.submit("b", [1], 1)
    refused = world.ends["b"]
    assert isinstance(refused, RequestRejected)
    assert refused.cause == "draining"
    world.settle()
    assert world.tokens["a"] == completion([1], 20)
    assert world.exit_code == 0


def test_second_drain_order_forces(make_world: MakeWorld) -> None:
    """A second order ends what runs with a failure, and the exit code says so."""
    world = make_world()
    world.submit("a", [1], 5_000)
    world.step()
    world.tell(DrainRequested())
    assert world.exit_code is None
    world.tell(DrainRequested())
    end = world.ends["a"]
    assert isinstance(end, RequestFailed)
    assert end.cause == "stopping"
    assert world.exit_code == 69


def test_stale_receipts_are_ignored(make_world: MakeWorld) -> None:
    """A receipt of a rank that belongs to no epoch changes nothing."""
    world = make_world()
    world.submit("a", [1, 2], 5)
    peer = next(iter(world.ranks))
    receipt = world.ranks[peer].execute(world.pending_plans[peer].popleft())
    world.tell(RankMessageReceived(PeerId(b"ghost"), receipt))
    assert world.tokens["a"] == []
    world.tell(RankMessageReceived(peer, msgspec.structs.replace(receipt, epoch=9)))
    assert world.tokens["a"] == []
    world.tell(RankMessageReceived(peer, receipt))
    world.settle()
    assert world.tokens["a"] == completion([1, 2], 5)
