"""Deadlines that fire when they must, and none that fires when it must not."""

from collections.abc import Callable

import pytest

from services.scheduler.batch.plan_builder import StepWork
from services.scheduler.batch.step_deadlines import StepDeadlines
from services.scheduler.batch.step_timing import StepTiming
from services.scheduler.events import RankLost, RankMessageReceived, TimePassed
from shared import limits
from shared.identifiers import PeerId
from shared.messages import RankLoading, RequestFailed, RequestFinished
from tests.unit.scheduler.in_memory_world import InMemoryWorld, completion
from tests.unit.scheduler.world_factory import MakeWorld


def shape(chunk: int = 0, decodes: int = 0, position: int = 0, rows: int = 256) -> StepWork:
    """Return what a step consists of."""
    return StepWork(
        chunk_tokens=chunk, chunk_position=position, decodes=decodes, row_count=4, row_tokens=rows
    )


def learner() -> tuple[StepTiming, StepDeadlines, Callable[[StepWork, float], None]]:
    """Return costs and deadlines of a new epoch, and how both learn from a step."""
    timing = StepTiming(decode_stall_ms=150.0)
    deadlines = StepDeadlines(timing)

    def ran(one: StepWork, busy_ms: float) -> None:
        timing.record_step(one.chunk_tokens, one.decodes, busy_ms, one.chunk_position)
        deadlines.record_step(one)

    return timing, deadlines, ran


def test_a_deadline_follows_the_work() -> None:
    """Known work gets ten times its prediction, within bounds."""
    _, deadlines, ran = learner()
    ran(shape(decodes=1), 10.0)
    assert deadlines.deadline_s(shape(decodes=1)) == limits.STEP_DEADLINE_MIN_S
    ran(shape(chunk=1_000), 2_000.0)
    assert deadlines.deadline_s(shape(chunk=1_000)) == 20.0
    ran(shape(chunk=1_000), 20_000.0)
    ran(shape(chunk=1_000), 20_000.0)
    assert deadlines.deadline_s(shape(chunk=1_000)) == limits.STEP_DEADLINE_MAX_S


@pytest.mark.parametrize(
    "first",
    [
        shape(decodes=1),
        shape(decodes=5),
        shape(chunk=100),
        shape(chunk=700),
        shape(chunk=100, position=30_000),
        shape(decodes=4, rows=512),
    ],
    ids=["first", "batch", "prefill", "large", "deep", "rows"],
)
def test_what_has_not_run_yet_has_the_most_time(first: StepWork) -> None:
    """The first step of a kind may compile kernels for seconds; the second is known."""
    _, deadlines, ran = learner()
    if first != shape(decodes=1):
        ran(shape(decodes=1), 10.0)
    if first.row_tokens != 256:
        ran(shape(decodes=4), 10.0)
    if first.chunk_position:
        ran(shape(chunk=100), 10.0)
    assert deadlines.deadline_s(first) == limits.STEP_DEADLINE_MAX_S
    ran(first, 7_000.0)
    ran(first, 10.0)
    assert deadlines.deadline_s(first) < limits.STEP_DEADLINE_MAX_S


@pytest.mark.parametrize("token_ms", [0.01, 0.1, 3.0])
@pytest.mark.parametrize("depth_ms", [0.0, 0.00001, 0.0003])
@pytest.mark.parametrize("decoding", [True, False])
def test_no_false_alarm_when_a_machine_becomes_busy(
    token_ms: float, depth_ms: float, decoding: bool
) -> None:
    """Learnt on an idle machine, a long prompt is prefilled four times slower: no deadline fires.

    The cost of a token grows with its depth, so each chunk is deeper than any before; and a prompt
    whose first 100,000 tokens come from blocks begins at a depth that nothing has been measured at.
    """
    timing, deadlines, ran = learner()
    rows = 4 if decoding else 0
    ran(shape(decodes=4), 20.0)

    def cost_ms(chunk: int, position: int) -> float:
        return chunk * (token_ms + depth_ms * (position + chunk / 2)) + (20.0 if rows else 0.0)

    def prefill(position: int, until: int, slower: float) -> None:
        while position < until:
            chunk = timing.chunk_tokens(decoding=decoding, position=position)
            step = shape(chunk=chunk, decodes=rows, position=position)
            took_ms = slower * cost_ms(chunk, position)
            if took_ms < 1_000.0 * limits.STEP_DEADLINE_MAX_S:
                assert took_ms < 1_000.0 * deadlines.deadline_s(step), (position, chunk)
            ran(step, took_ms)
            position += chunk

    prefill(0, 6_000, 1.0)
    prefill(0, 12_000, 4.0)
    prefill(100_000, 104_000, 4.0)
    for count in (1, 4, 9, 32):
        deadline_s = deadlines.deadline_s(shape(decodes=count))
        assert 4.0 * 0.02 * count < deadline_s


def test_each_of_two_plans_has_its_own_time(make_world: MakeWorld) -> None:
    """The second plan in flight begins to count when the first is done, not when it was sent."""
    world = make_world()
    world.submit("a", [1, 2, 3], 10)
    peer = next(iter(world.ranks))
    assert len(world.pending_plans[peer]) == 2
    world.advance(55.0)
    world.rank_step(peer)
    world.advance(55.0)
    assert not world.dismissed
    world.advance(6.0)
    assert world.dismissed == [peer]
    world.start_rank(0)
    world.settle()
    assert world.tokens["a"] == completion([1, 2, 3], 10)


def test_a_known_step_is_given_seconds(make_world: MakeWorld) -> None:
    """Once a kind of step has run, a stuck one is noticed within the least deadline."""
    world = make_world()
    world.submit("a", [1, 2, 3], 200)
    for _ in range(20):
        world.step()
    world.advance(4.5)
    assert not world.dismissed
    world.advance(1.0)
    assert world.dismissed
    world.start_rank(0)
    world.settle()


def test_a_scheduler_that_was_stopped_blames_nobody(make_world: MakeWorld) -> None:
    """After SIGSTOP of the scheduler its clock jumps; receipts that waited are still taken."""
    world = make_world(ranks=2)
    world.submit("a", [1, 2, 3], 30)
    for _ in range(10):
        world.step()
    world.tell(TimePassed())
    first, second = world.ranks
    for _ in range(3):
        late = [
            world.ranks[peer].execute(world.pending_plans[peer].popleft()) for peer in world.ranks
        ]
        world.now_s += 300.0
        # The clock is looked at before ZeroMQ's thread has caught up with what has arrived.
        world.tell(TimePassed())
        world.advance(1.0)
        for peer, receipt in zip((first, second), late, strict=True):
            world.tell(RankMessageReceived(peer, receipt))
    assert not world.dismissed
    assert [one.event for one in world.log_lines].count("scheduler_stalled") == 3
    world.settle()
    assert world.tokens["a"] == completion([1, 2, 3], 30)


def test_receipts_that_come_first_after_a_jump_are_no_alarm(make_world: MakeWorld) -> None:
    """As the shell polls: what ranks said, then the clock. The new plan's time has just begun."""
    world = make_world()
    world.submit("a", [1, 2, 3], 30)
    world.tell(TimePassed())
    for _ in range(5):
        world.now_s += 100.0
        world.rank_step(next(iter(world.ranks)))
        world.tell(TimePassed())
        assert not world.dismissed
        assert world.status is not None
        assert world.status.gauges["step_stalled_s"] >= 0.0
    world.settle()
    assert world.tokens["a"] == completion([1, 2, 3], 30)


def test_a_stuck_rank_is_noticed_after_a_jump_too(make_world: MakeWorld) -> None:
    """Time that did not count delays a deadline; it does not lift it."""
    world = make_world()
    world.submit("a", [1, 2, 3], 3)
    world.tell(TimePassed())
    world.now_s += 1_000.0
    world.tell(TimePassed())
    world.advance(59.0)
    assert not world.dismissed
    world.advance(2.0)
    assert world.dismissed
    world.start_rank(0)
    world.settle()


def test_loading_is_not_blamed_for_a_jump_either(make_world: MakeWorld) -> None:
    """Ranks that join while the scheduler is stopped have the time that they were promised."""
    world = make_world(ranks=2, init_deadline_s=10.0)
    world.tell(TimePassed())
    world.core._world.dismiss_ranks("test", world.now_s)
    world.ranks.clear()
    for number in range(2):
        world._join = lambda peer, message: None  # type: ignore[method-assign]
        peer = world.start_rank(number)
        world.tell(RankMessageReceived(peer, RankLoading(stage="joining", loaded=0.0)))
    world.now_s += 500.0
    world.tell(TimePassed())
    epoch_ended = [one for one in world.log_lines if one.event == "epoch_ended"]
    assert not epoch_ended
    world.advance(11.0)
    assert [one.fields["cause"] for one in world.log_lines if one.event == "epoch_ended"] == [
        "The ranks have not joined within 10 s."
    ]


# --- the queue -------------------------------------------------------------------------------


def failed(world: InMemoryWorld, name: str) -> RequestFailed:
    """Return how a request failed."""
    end = world.ends[name]
    assert isinstance(end, RequestFailed), end
    return end


def test_a_request_does_not_wait_for_a_slot_for_ever(make_world: MakeWorld) -> None:
    """After queue_deadline_s it fails with a sentence; who runs is not touched."""
    world = make_world(running_sequences_max=1, queue_deadline_s=4.0)
    world.submit("runs", [1], 30)
    world.step()
    world.submit("waits", [2], 30)
    world.advance(4.0)
    assert "waits" not in world.ends
    world.advance(0.5)
    end = failed(world, "waits")
    assert (end.cause, end.detail) == (
        "queue_deadline",
        "Waited 4 s for a slot, which is the longest allowed.",
    )
    world.settle()
    assert world.tokens["runs"] == completion([1], 30)


def test_who_has_run_does_not_fall_under_it(make_world: MakeWorld) -> None:
    """An hour of loading after a lost rank costs a running request nothing but the hour."""
    world = make_world(ranks=2, queue_deadline_s=600.0)
    world.submit("ran", [1], 30, deadline_s=9_000.0)
    for _ in range(5):
        world.step()
    whole = completion([2], 30)
    world.tokens["resumed"] = whole[:4]
    world.submit("resumed", [2], 30, generated=whole[:4], deadline_s=9_000.0)
    victim = next(iter(world.ranks))
    world.ranks.pop(victim)
    world.tell(RankLost(victim, "goodbye"))
    world.submit("new", [3], 30, deadline_s=9_000.0)
    world.advance(3_600.0)
    assert failed(world, "new").cause == "queue_deadline"
    for rank in range(2):
        world.start_rank(rank)
    world.settle()
    assert world.tokens["ran"] == completion([1], 30)
    assert world.tokens["resumed"] == whole


def test_who_was_preempted_does_not_fall_under_it(make_world: MakeWorld) -> None:
    """A sequence that gave up its row for others has had a slot."""
    world = make_world(kv_tokens=512, kv_row_growth_tokens=64, queue_deadline_s=1.0)
    for index in range(3):
        world.submit(f"r{index}", [index + 1] * 60, 120)
    for _ in range(2_000):
        world.step()
        world.tell(TimePassed())
    world.settle()
    assert all(isinstance(end, RequestFinished) for end in world.ends.values())
    assert world.core._batch.preemptions > 0


def test_the_requests_own_deadline_still_holds(make_world: MakeWorld) -> None:
    """A request that gives itself less time than the queue does fails as it asked."""
    world = make_world(running_sequences_max=1, queue_deadline_s=60.0)
    world.submit("a", [1], 5_000)
    world.submit("b", [2], 5, deadline_s=3.0)
    world.advance(3.5)
    assert failed(world, "b").cause == "deadline"
    world.abort("a")
    assert world.tokens["b"] == []
    peer = PeerId(next(iter(world.ranks)))
    assert peer not in world.dismissed
    world.settle()
