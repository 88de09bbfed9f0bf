"""The core as a whole: tokens, ends, aborts, recovery and refusals."""

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
from tests.unit.scheduler.support.in_memory_world import (
    GATEWAY,
    VOCABULARY,
    InMemoryWorld,
    completion,
)
from tests.unit.scheduler.support.world_factory import MakeWorld


def finished(world: InMemoryWorld, request_id: str) -> RequestFinished:
    """Return the end of a request that finished; fail on any other end."""
    end = world.ends[request_id]
    assert isinstance(end, RequestFinished), end
    return end


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_each_request_gets_its_own_tokens_in_order(
    make_world: MakeWorld, ranks: int, plans_in_flight: int
) -> None:
    """Each request gets exactly its own tokens, in order, beside other requests."""
    world = make_world(ranks=ranks, plans_in_flight=plans_in_flight)
    prompts = {f"r{i}": list(range(1, 5 + 37 * i)) for i in range(6)}
    for request_id, prompt in prompts.items():
        world.submit(request_id, prompt, 20)
    world.settle()
    for request_id, prompt in prompts.items():
        assert world.tokens[request_id] == completion(prompt, 20)
        end = finished(world, request_id)
        assert (end.finish_reason, end.completion_tokens) == ("length", 20)


def test_stop_token_is_sent_and_ends_request(make_world: MakeWorld) -> None:
    """A stop id ends the completion at once; the token of the plan in flight is dropped."""
    world = make_world()
    prompt = [1, 2, 3]
    stop = completion(prompt, 8)[5]
    world.submit("a", prompt, 100, stop_ids=[stop])
    world.settle()
    assert world.tokens["a"] == completion(prompt, 100, (stop,))
    assert finished(world, "a").finish_reason == "stop"


def test_next_plan_is_sent_while_step_runs(make_world: MakeWorld) -> None:
    """While one step runs, the ranks already have the next plan, so the device need not wait."""
    world = make_world()
    world.submit("a", [1, 2, 3], 10)
    peer = next(iter(world.ranks))
    assert len(world.pending_plans[peer]) == 2
    assert world.pending_plans[peer][1].decodes
    world.settle()


def test_no_token_is_sent_before_all_receipts_agree(make_world: MakeWorld) -> None:
    """One receipt of two sends nothing; both send the token (I6)."""
    world = make_world(ranks=2)
    world.submit("a", [1, 2, 3], 4)
    first, second = world.ranks
    world.rank_step(first)
    assert world.tokens["a"] == []
    world.rank_step(second)
    assert len(world.tokens["a"]) == 1
    world.settle()


def test_different_receipt_digests_end_epoch_and_send_no_token_of_step(
    make_world: MakeWorld,
) -> None:
    """After unequal digests no token of the step is sent, evidence is saved, all ranks leave, and
    the request continues in the next epoch.
    """
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
def test_streams_continue_without_gap_after_lost_rank(make_world: MakeWorld, ranks: int) -> None:
    """After a rank is lost at any step and restarted, every stream continues without gap or
    repeat."""
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


def test_missed_step_deadline_ends_epoch(make_world: MakeWorld) -> None:
    """A step that never finishes ends the epoch by the scheduler's clock."""
    world = make_world()
    world.submit("a", [1, 2], 3)
    world.advance(59.0)
    assert not world.dismissed
    world.advance(2.0)
    assert world.dismissed
    world.start_rank(0)
    world.settle()
    assert world.tokens["a"] == completion([1, 2], 3)


def test_permanent_rank_failure_fails_all_requests(make_world: MakeWorld) -> None:
    """When a restart cannot help, requests fail with the reason instead of waiting."""
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


def test_abort_at_any_step_ends_request_exactly_once(make_world: MakeWorld) -> None:
    """An abort in queue, prefill, decode or after the end ends the request once; other requests are
    untouched."""
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
        reason = finished(world, "drop").finish_reason
        assert reason == ("length" if len(world.tokens["drop"]) == 6 else "abort")
        assert world.tokens["keep"] == completion([4, 4, 4], 6)
        assert not any(rank.rows for rank in world.ranks.values()), "every row is given back"


def test_requests_of_lost_gateway_end_without_message_to_it(make_world: MakeWorld) -> None:
    """Requests of a lost gateway end and their rows are freed. The gateway is told nothing: after a
    restart under the same name it would take the message for its resubmitted request."""
    world = make_world()
    world.submit("a", [1, 2, 3], 1_000)
    world.step()
    world.tell(GatewayLost(GATEWAY))
    world.settle()
    assert "a" not in world.ends
    assert len(world.core._requests) == 0
    assert not any(rank.rows for rank in world.ranks.values())


def test_preempted_sequence_gets_tokens_of_uninterrupted_run(make_world: MakeWorld) -> None:
    """When rows do not fit, the youngest sequence returns to the queue and finishes later with the
    same tokens."""
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
def test_finished_rows_are_dropped_before_long_row_grows(
    make_world: MakeWorld, stays: int, method: str
) -> None:
    """Three of four short requests end; the fourth moves to a lower slot, and the long request gets
    two rows in all."""
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


def test_request_of_higher_priority_is_admitted_first(make_world: MakeWorld) -> None:
    """A request of higher priority is admitted before earlier ones; equal priorities keep their
    order."""
    world = make_world(running_sequences_max=1)
    world.submit("running", [1], 5)
    world.submit("first", [2], 1)
    world.submit("second", [3], 1)
    world.submit("urgent", [4], 1, priority=5)
    world.settle()
    assert list(world.ends) == ["running", "urgent", "first", "second"]


def test_repeated_submit_with_generated_tokens_resumes_after_them_only_once(
    make_world: MakeWorld,
) -> None:
    """A repeated submit changes nothing; one with `generated` continues at that position."""
    world = make_world()
    whole = completion([9, 8], 10)
    world.tokens["a"] = whole[:4]
    world.submit("a", [9, 8], 10, generated=whole[:4])
    world.submit("a", [9, 8], 10, generated=whole[:4])
    world.settle()
    assert world.tokens["a"] == whole
    assert finished(world, "a").completion_tokens == 10


def test_resubmitted_complete_request_gets_end_without_tokens(make_world: MakeWorld) -> None:
    """A gateway that resubmits after the last token gets the end and no further token."""
    world = make_world()
    whole = completion([9, 8], 3)
    world.tokens["a"], world.tokens["b"] = list(whole), list(whole)
    world.submit("a", [9, 8], 3, generated=whole)
    world.submit("b", [9, 8], 9, generated=whole, stop_ids=[whole[-1]])
    world.settle()
    assert finished(world, "a").finish_reason == "length"
    assert finished(world, "b").finish_reason == "stop"
    assert world.tokens["a"] == whole


@dataclasses.dataclass
class RefusedRequest:
    """A request that cannot be served, and the cause of its rejection."""

    cause: str
    prompt: list[int]
    options: dict[str, Any]


@pytest.mark.parametrize(
    "case",
    [
        RefusedRequest("too_long", [1] * 100, {}),
        RefusedRequest("invalid", [1, 2, VOCABULARY], {}),
        RefusedRequest("too_long", [1], {"generated": [1, 2, 3, 4, 5, 6]}),
    ],
)
def test_request_that_can_never_fit_memory_is_rejected(
    make_world: MakeWorld, case: RefusedRequest
) -> None:
    """A request that can never fit is rejected with the numbers before anything is computed."""
    world = make_world(context=100)
    world.submit("a", case.prompt, 5, **case.options)
    end = world.ends["a"]
    assert isinstance(end, RequestRejected)
    assert end.cause == case.cause
    assert any(character.isdigit() for character in end.detail)
    assert not world.plans


def test_completion_finishes_with_reason_length_at_context_end(make_world: MakeWorld) -> None:
    """A completion ends with finish reason `length` where the context ends."""
    world = make_world(context=50)
    world.submit("a", [1] * 40, 100)
    world.settle()
    assert len(world.tokens["a"]) == 10
    assert finished(world, "a").finish_reason == "length"


def test_full_queue_rejects_request_with_retry_time(make_world: MakeWorld) -> None:
    """Requests beyond the queue's limit are refused with a retry time from 1 to 120 s."""
    world = make_world(running_sequences_max=1, waiting_requests_max=2)
    for index in range(5):
        world.submit(f"r{index}", [index], 3)
    refused = [end for end in world.ends.values() if isinstance(end, RequestRejected)]
    assert refused
    assert all(end.cause == "queue_full" for end in refused)
    assert all(1.0 <= (end.retry_after_s or 0.0) <= 120.0 for end in refused)
    world.settle()


def test_retry_time_grows_with_request_duration(make_world: MakeWorld) -> None:
    """The retry time is longer when requests run longer."""
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


def test_unfinished_request_fails_at_its_deadline(make_world: MakeWorld) -> None:
    """A request that is not finished before its deadline fails, waiting or running."""
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


def test_drain_finishes_running_and_refuses_new_requests(make_world: MakeWorld) -> None:
    """During a drain running requests finish and new ones are refused; then the scheduler stops."""
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


def test_second_stop_signal_fails_running_requests(make_world: MakeWorld) -> None:
    """A second stop signal fails running requests, and the exit code is 69."""
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


def test_step_receipt_of_unknown_rank_or_epoch_is_ignored(make_world: MakeWorld) -> None:
    """A receipt of an unknown peer or another epoch changes nothing."""
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
