"""Step and queue deadlines: stuck ranks miss them, slow steps and a stopped scheduler do not."""

from collections.abc import Callable

import pytest

from services.scheduler.batch.plan_builder import StepWork
from services.scheduler.batch.step_deadlines import StepDeadlines
from services.scheduler.batch.step_timing import StepTiming
from services.scheduler.events import PeerSilent, RankLost, RankMessageReceived, TimePassed
from shared import limits
from shared.configuration.loading import config_from_tree
from shared.configuration.settings import SchedulerConfig
from shared.errors import ConfigError
from shared.identifiers import PeerId
from shared.messages import RankLoading, RequestFailed, RequestFinished
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, completion
from tests.unit.scheduler.support.world_factory import MakeWorld


def step_work(chunk: int = 0, decodes: int = 0, position: int = 0, rows: int = 256) -> StepWork:
    """Return the work of a step."""
    return StepWork(
        chunk_tokens=chunk, chunk_position=position, decodes=decodes, row_count=4, row_tokens=rows
    )


def new_deadlines(
    config: SchedulerConfig | None = None,
) -> tuple[StepTiming, StepDeadlines, Callable[[StepWork, float], None]]:
    """Return timing and deadlines of a new epoch, and a function that records a step in both."""
    timing = StepTiming(decode_stall_ms=150.0)
    deadlines = StepDeadlines(timing, config or SchedulerConfig())

    def record(one: StepWork, busy_ms: float) -> None:
        timing.record_step(one.chunk_tokens, one.decodes, busy_ms, one.chunk_position)
        deadlines.record_step(one)

    return timing, deadlines, record


def test_step_deadline_is_ten_times_predicted_duration_within_bounds() -> None:
    """A known step gets ten times its predicted time, within bounds."""
    _, deadlines, record = new_deadlines()
    record(step_work(decodes=1), 10.0)
    assert deadlines.deadline_s(step_work(decodes=1)) == limits.STEP_DEADLINE_MIN_S
    record(step_work(chunk=1_000), 2_000.0)
    assert deadlines.deadline_s(step_work(chunk=1_000)) == 20.0
    record(step_work(chunk=1_000), 20_000.0)
    record(step_work(chunk=1_000), 20_000.0)
    assert deadlines.deadline_s(step_work(chunk=1_000)) == limits.STEP_DEADLINE_MAX_S


def test_step_deadline_follows_settings() -> None:
    """Factor, shortest and longest deadline are settings, and the longest is at least the
    shortest."""
    config = SchedulerConfig(
        step_deadline_factor=4.0, step_deadline_min_s=2.0, step_deadline_max_s=300.0
    )
    _, deadlines, record = new_deadlines(config)
    assert deadlines.deadline_s(step_work(decodes=1)) == 300.0
    record(step_work(decodes=1), 10.0)
    assert deadlines.deadline_s(step_work(decodes=1)) == 2.0
    record(step_work(chunk=1_000), 20_000.0)
    assert deadlines.deadline_s(step_work(chunk=1_000)) == 80.0
    with pytest.raises(ConfigError, match="step_deadline_min_s is 100"):
        config_from_tree({"scheduler": {"step_deadline_min_s": 100.0}})


@pytest.mark.parametrize(
    "first",
    [
        step_work(decodes=1),
        step_work(decodes=5),
        step_work(chunk=100),
        step_work(chunk=700),
        step_work(chunk=100, position=30_000),
        step_work(decodes=4, rows=512),
    ],
    ids=["first", "batch", "prefill", "large", "deep", "rows"],
)
def test_unmeasured_kind_of_step_gets_longest_deadline(first: StepWork) -> None:
    """The first step of a kind may compile kernels for seconds; the second one is predicted."""
    _, deadlines, record = new_deadlines()
    if first != step_work(decodes=1):
        record(step_work(decodes=1), 10.0)
    if first.row_tokens != 256:
        record(step_work(decodes=4), 10.0)
    if first.chunk_position:
        record(step_work(chunk=100), 10.0)
    assert deadlines.deadline_s(first) == limits.STEP_DEADLINE_MAX_S
    record(first, 7_000.0)
    record(first, 10.0)
    assert deadlines.deadline_s(first) < limits.STEP_DEADLINE_MAX_S


@pytest.mark.parametrize("token_ms", [0.01, 0.1, 3.0])
@pytest.mark.parametrize("depth_ms", [0.0, 0.00001, 0.0003])
@pytest.mark.parametrize("decoding", [True, False])
def test_prefill_four_times_slower_than_measured_misses_no_step_deadline(
    token_ms: float, depth_ms: float, decoding: bool
) -> None:
    """Deadlines learnt on an idle machine hold when a long prompt is prefilled four times slower.

    The cost of a token grows with its position, so each chunk costs more than any before; and a
    prompt whose first 100,000 tokens come from blocks begins at a position without measurements.
    """
    timing, deadlines, record = new_deadlines()
    rows = 4 if decoding else 0
    record(step_work(decodes=4), 20.0)

    def cost_ms(chunk: int, position: int) -> float:
        return chunk * (token_ms + depth_ms * (position + chunk / 2)) + (20.0 if rows else 0.0)

    def prefill(position: int, until: int, slower: float) -> None:
        while position < until:
            chunk = timing.chunk_tokens(decoding=decoding, position=position)
            step = step_work(chunk=chunk, decodes=rows, position=position)
            took_ms = slower * cost_ms(chunk, position)
            if took_ms < 1_000.0 * limits.STEP_DEADLINE_MAX_S:
                assert took_ms < 1_000.0 * deadlines.deadline_s(step), (position, chunk)
            record(step, took_ms)
            position += chunk

    prefill(0, 6_000, 1.0)
    prefill(0, 12_000, 4.0)
    prefill(100_000, 104_000, 4.0)
    for count in (1, 4, 9, 32):
        deadline_s = deadlines.deadline_s(step_work(decodes=count))
        assert 4.0 * 0.02 * count < deadline_s


def test_deadline_of_second_plan_starts_when_first_step_finishes(make_world: MakeWorld) -> None:
    """The deadline of the second plan in flight begins when the first is done, not when it was
    sent."""
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


def test_stuck_step_of_measured_kind_misses_shortest_deadline(make_world: MakeWorld) -> None:
    """After a kind of step has run, a stuck one is noticed within the shortest deadline."""
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


def test_receipts_that_arrive_while_scheduler_is_suspended_meet_their_deadlines(
    make_world: MakeWorld,
) -> None:
    """After SIGSTOP of the scheduler its clock jumps; receipts that waited are in time."""
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
        # The clock is read before ZeroMQ's thread has delivered the waiting receipts.
        world.tell(TimePassed())
        world.advance(1.0)
        for peer, receipt in zip((first, second), late, strict=True):
            world.tell(RankMessageReceived(peer, receipt))
    assert not world.dismissed
    assert [one.event for one in world.log_lines].count("scheduler_stalled") == 3
    world.settle()
    assert world.tokens["a"] == completion([1, 2, 3], 30)


def test_epoch_continues_when_receipts_are_read_before_first_timer_after_clock_jump(
    make_world: MakeWorld,
) -> None:
    """When receipts are read before the first timer after a clock jump, the new plan gets its full
    deadline.
    """
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


def test_stuck_rank_is_dismissed_one_full_deadline_after_clock_jump(make_world: MakeWorld) -> None:
    """A clock jump delays the deadline of a stuck rank and does not cancel it."""
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


def test_joining_ranks_get_full_deadline_again_after_clock_jump(make_world: MakeWorld) -> None:
    """Ranks that join while the scheduler is stopped get their whole time to join."""
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
    (cause,) = [one.fields["cause"] for one in world.log_lines if one.event == "epoch_ended"]
    assert cause.startswith("The ranks have not joined within 10 s (scheduler.init_deadline_s): ")


# --- the queue ------------------------------------------------------------------------------------


def failure_of(world: InMemoryWorld, name: str) -> RequestFailed:
    """Return the failure of a request; fail on any other end."""
    end = world.ends[name]
    assert isinstance(end, RequestFailed), end
    return end


def test_waiting_request_fails_at_queue_deadline(make_world: MakeWorld) -> None:
    """After queue_deadline_s a waiting request fails with a reason; the running one is
    untouched."""
    world = make_world(running_sequences_max=1, queue_deadline_s=4.0)
    world.submit("runs", [1], 30)
    world.step()
    world.submit("waits", [2], 30)
    world.advance(4.0)
    assert "waits" not in world.ends
    world.advance(0.5)
    end = failure_of(world, "waits")
    assert (end.cause, end.detail) == (
        "queue_deadline",
        "Waited 4 s for a slot, which is the longest allowed.",
    )
    world.settle()
    assert world.tokens["runs"] == completion([1], 30)


def test_queue_deadline_fails_no_request_that_has_already_run(make_world: MakeWorld) -> None:
    """An hour of loading after a lost rank fails no request that has already run."""
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
    assert failure_of(world, "new").cause == "queue_deadline"
    for rank in range(2):
        world.start_rank(rank)
    world.settle()
    assert world.tokens["ran"] == completion([1], 30)
    assert world.tokens["resumed"] == whole


def test_queue_deadline_fails_no_preempted_sequence(make_world: MakeWorld) -> None:
    """A preempted sequence has had a slot, so the queue deadline does not apply."""
    world = make_world(kv_tokens=512, kv_row_growth_tokens=64, queue_deadline_s=1.0)
    for index in range(3):
        world.submit(f"r{index}", [index + 1] * 60, 120)
    for _ in range(2_000):
        world.step()
        world.tell(TimePassed())
    world.settle()
    assert all(isinstance(end, RequestFinished) for end in world.ends.values())
    assert world.core._batch.preemptions > 0


def test_request_fails_at_own_deadline_when_shorter_than_queue_deadline(
    make_world: MakeWorld,
) -> None:
    """A request whose own deadline is shorter than the queue's fails at its own."""
    world = make_world(running_sequences_max=1, queue_deadline_s=60.0)
    world.submit("a", [1], 5_000)
    world.submit("b", [2], 5, deadline_s=3.0)
    world.advance(3.5)
    assert failure_of(world, "b").cause == "deadline"
    world.abort("a")
    assert world.tokens["b"] == []
    peer = PeerId(next(iter(world.ranks)))
    assert peer not in world.dismissed
    world.settle()


def test_step_that_takes_half_of_its_deadline_is_warned_of_once(make_world: MakeWorld) -> None:
    """The log and a counter tell of a late step, with the ranks that answered, before it ends the
    epoch."""
    world = make_world(ranks=2, step_deadline_max_s=40.0)
    world.submit("a", [1, 2], 3)
    world.advance(19.0)
    assert not [one for one in world.log_lines if one.event == "step_late"]

    world.advance(20.0)

    (late,) = [one for one in world.log_lines if one.event == "step_late"]
    assert late.level == "warning"
    assert late.fields["deadline_s"] == 40.0
    assert late.fields["answered"] == []
    assert not world.dismissed
    world.advance(2.0)
    assert world.dismissed
    world.tell(PeerSilent())
    assert world.core._counters["steps_late_total"] == 1
    assert world.core._counters["peer_silences_total"] == 1
    for rank in range(2):
        world.start_rank(rank)
    world.settle()
