"""History of steps and sums of ranks, from what ranks with clocks of their own report."""

from typing import Any

import pytest

from services.scheduler.events import GatewayMessageReceived, RankMessageReceived
from services.scheduler.telemetry import step_history
from shared.configuration.rank_settings import WorldConfig
from shared.configuration.settings import Config, SpeculationConfig
from shared.identifiers import PeerId
from shared.messages import HeadExchanges, QueryStatus, RankStatus, StepsMeasured
from shared.messages.telemetry.step_times import StepTimes, pack
from tests.unit.scheduler.support.in_memory_world import GATEWAY, InMemoryWorld

OFFSETS_S = {0: 1_000.0, 1: -40.0}
"""Clocks of the ranks minus that of the scheduler."""
LATE_S = 0.002
"""Rank 1 ends each step that much later than rank 0."""


def _world(speculation: SpeculationConfig | None = None) -> InMemoryWorld:
    two_ranks = WorldConfig(size=2, backend="ring")
    config = Config(world=two_ranks, speculation=speculation or SpeculationConfig())
    world = InMemoryWorld(config)
    world.boot()
    return world


def _report(world: InMemoryWorld, peer: PeerId, steps: range, **fields: Any) -> None:
    """Let a rank report steps that took 6 ms; plans and receipts are under way for 0.1 ms."""
    rank = world.ranks[peer].rank
    offset_s, late_s = OFFSETS_S[rank], LATE_S * rank
    times = []
    for step_id in steps:
        record = world.core._telemetry.history.find(1, step_id)
        assert record is not None
        came_s = record.sent_at_s + 1e-4
        record.received_at_s[rank] = came_s + 0.007 + late_s + 1e-4
        ended = (0.006 + late_s, 0.007 + late_s)
        own = [came_s + one + offset_s for one in (0.0, 0.001, 0.002, 0.002, *ended)]
        times.append(StepTimes(*own))
    memory: dict[str, Any] = {"active_bytes": 1, "peak_bytes": 2, "cached_bytes": 3, **fields}
    report = StepsMeasured(
        epoch=1,
        rank=rank,
        first_step_id=steps.start,
        origin_s=times[0].came_s,
        times=pack(times, times[0].came_s),
        **memory,
    )
    world.tell(RankMessageReceived(peer, report))


def _statuses(world: InMemoryWorld) -> list[RankStatus]:
    world.tell(GatewayMessageReceived(GATEWAY, QueryStatus()))
    assert world.status is not None
    return world.status.ranks


def test_times_of_ranks_with_different_clocks_lie_on_one_axis() -> None:
    """Each rank's times are moved by its own offset, so that they can be compared."""
    world = _world()
    world.submit("a", [1, 2, 3], 5)
    world.settle()
    for peer in world.ranks:
        _report(world, peer, range(1, 6))
    for record in world.core._telemetry.history.since((0, 0)):
        if record.step_id > 5:
            continue
        for rank in (0, 1):
            times = record.times[rank].unpack()
            assert times.came_s - record.sent_at_s == pytest.approx(1e-4, abs=1e-5)
            expected_s = 1e-4 + 0.006 + LATE_S * rank
            assert times.ended_s - record.sent_at_s == pytest.approx(expected_s, abs=1e-5)


def test_status_has_lateness_memory_and_clock_of_each_rank() -> None:
    """The rank that others wait for is the one with lateness."""
    world = _world()
    world.submit("a", [1, 2, 3], 5)
    world.settle()
    before = _statuses(world)
    for number, peer in enumerate(world.ranks):
        _report(world, peer, range(1, 6), peak_bytes=100 + number, cached_bytes=7)
    world.now_s += 3.0
    first, second = _statuses(world)
    assert [one.peak_bytes for one in before] == [0, 0]
    assert [one.clock_error_s for one in before] == [0.0, 0.0]
    assert first.late_s == pytest.approx(0.0, abs=1e-5)
    assert second.late_s == pytest.approx(5 * LATE_S, abs=1e-4)
    assert (first.peak_bytes, second.peak_bytes) == (100, 101)
    assert first.cached_bytes == second.cached_bytes == 7
    assert first.clock_offset_s == pytest.approx(OFFSETS_S[0], abs=1e-5)
    assert second.clock_offset_s == pytest.approx(OFFSETS_S[1], abs=1e-5)
    assert first.silence_s == second.silence_s == 3.0
    assert first.busy_s > 0.0


def test_steps_of_a_divided_head_count_once_over_all_ranks() -> None:
    """All ranks sample alike, so the reports of the primary rank are added up."""
    world = _world()
    world.submit("a", [1, 2, 3], 8)
    world.settle()
    used = HeadExchanges(candidate_steps=3, gathered_steps=1, sent_bytes=500)
    for peer in world.ranks:
        _report(world, peer, range(1, 4), head=used)
        _report(world, peer, range(4, 6), head=used)
    _statuses(world)
    assert world.status is not None
    counters = world.status.counters
    assert counters["head_candidate_steps_total"] == 6.0
    assert counters["head_gathered_steps_total"] == 2.0
    assert counters["head_sent_bytes_total"] == 1_000.0


def test_history_says_what_each_step_had_to_do() -> None:
    """Prompts, decodes and verified drafts are told apart."""
    world = _world(speculation=SpeculationConfig(method="ngram"))
    world.submit("a", [999, 3, *range(40)], 30)
    world.settle()
    records = list(world.core._telemetry.history.since((0, 0)))
    assert [one.step_id for one in records] == list(range(1, len(records) + 1))
    assert sum(one.prefill_tokens for one in records) == 42
    assert records[0].kind == "prefill"
    kinds = {one.kind for one in records}
    assert {"prefill", "decode", "verify"} <= kinds
    for one in records:
        assert (one.kind == "verify") == (one.drafts > 0)
        assert one.finished_at_s is not None
        assert set(one.received_at_s) == {0, 1}


def test_history_of_many_steps_keeps_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that runs for months does not grow."""
    monkeypatch.setattr(step_history, "STEPS_KEPT", 10)
    world = _world()
    world.submit("a", [1, 2, 3], 50)
    world.settle()
    history = world.core._telemetry.history
    ids = [one.step_id for one in history.since((0, 0))]
    assert ids == list(range(ids[-1] - 9, ids[-1] + 1))
    assert [one.step_id for one in history.since((1, ids[-1] - 2))] == ids[-2:]
    peer = next(iter(world.ranks))
    record = history.find(1, ids[-1])
    assert record is not None
    report = StepsMeasured(
        epoch=1,
        rank=0,
        first_step_id=1,
        origin_s=0.0,
        times=pack([StepTimes(0, 0, 0, 0, 0, 0)] * ids[-1], 0.0),
        active_bytes=0,
        peak_bytes=0,
        cached_bytes=0,
    )
    world.tell(RankMessageReceived(peer, report))
    assert set(record.times) == {0}


def test_report_of_ended_epoch_changes_nothing() -> None:
    """A late message of a rank that was dismissed is counted only."""
    world = _world()
    world.submit("a", [1, 2, 3], 5)
    world.settle()
    peer = next(iter(world.ranks))
    world.tell(
        RankMessageReceived(
            peer,
            StepsMeasured(
                epoch=9,
                rank=0,
                first_step_id=1,
                origin_s=0.0,
                times=pack([StepTimes(0, 0, 0, 0, 9, 9)], 0.0),
                active_bytes=0,
                peak_bytes=5,
                cached_bytes=0,
            ),
        )
    )
    (first, _) = _statuses(world)
    assert (first.peak_bytes, first.late_s) == (0, 0.0)
    assert world.core._telemetry._ranks[0].peak_bytes == 0
