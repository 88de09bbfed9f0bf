"""Choice of the steps that are measured part by part, and the reports about them."""

import pytest

from services.scheduler.events import GatewayMessageReceived, RankMessageReceived
from shared.configuration.rank_settings import WorldConfig
from shared.configuration.settings import Config, SchedulerConfig, SpeculationConfig
from shared.identifiers import PeerId
from shared.messages import (
    OrderProfile,
    PartTotal,
    ProfilesReported,
    QueryProfiles,
    QueryStatus,
    StepProfile,
    StepsMeasured,
)
from shared.messages.telemetry.step_profile import Part, Span, pack_spans
from tests.unit.scheduler.support.in_memory_world import GATEWAY, InMemoryWorld

OPERATOR = PeerId(b"operator-1")


def _world(every: int) -> InMemoryWorld:
    world = InMemoryWorld(
        Config(
            world=WorldConfig(size=2, backend="ring"),
            scheduler=SchedulerConfig(profile_every_steps=every),
            speculation=SpeculationConfig(method="ngram"),
        )
    )
    world.boot()
    return world


def _profile(rank: int, step_id: int, parts: dict[Part, float]) -> StepProfile:
    spans = [Span(part, 0, 0.0, seconds) for part, seconds in parts.items()]
    return StepProfile(
        rank=rank,
        step_id=step_id,
        began_s=1.0,
        seconds=sum(parts.values()),
        kv_bytes=0,
        parts=[PartTotal(part=part, runs=1, seconds=one) for part, one in parts.items()],
        spans=pack_spans(spans),
    )


def _report(world: InMemoryWorld, rank: int, profiles: list[StepProfile]) -> None:
    peer = next(peer for peer, one in world.ranks.items() if one.rank == rank)
    report = StepsMeasured(
        epoch=1,
        rank=rank,
        first_step_id=1,
        origin_s=0.0,
        times=b"",
        profiles=profiles,
        active_bytes=0,
        peak_bytes=0,
        cached_bytes=0,
    )
    world.tell(RankMessageReceived(peer, report))


def test_one_step_of_each_kind_in_n_is_measured() -> None:
    """Steps of all kinds are measured in turn, so that rare ones are too."""
    world = _world(every=5)
    for number in range(12):
        world.submit(f"{number}", [999, 3, *range(number, 40)], 30)
        world.settle()
    measured = [plan for plan in world.plans if plan.profile]
    prefills = [plan for plan in world.plans if plan.prefill_chunks]
    decodes = [plan for plan in world.plans if plan.decodes and not plan.prefill_chunks]
    assert {plan.profile for plan in measured} == {"times"}
    assert sum(bool(plan.profile) for plan in prefills) == len(prefills) // 5
    plain = [plan for plan in decodes if not any(plan.drafts)]
    drafted = [plan for plan in decodes if any(plan.drafts)]
    for kind in (plain, drafted):
        assert len(kind) >= 5
        assert abs(sum(bool(plan.profile) for plan in kind) - len(kind) / 5) <= 1


def test_no_step_is_measured_when_setting_is_zero_and_no_operator_orders_it() -> None:
    """A gateway cannot make steps slower; the next n steps are measured once ordered."""
    world = _world(every=0)
    world.tell(GatewayMessageReceived(GATEWAY, OrderProfile(steps=3, primitives=True)))
    world.submit("a", [1, 2, 3], 10)
    world.settle()
    assert not any(plan.profile for plan in world.plans)
    world.tell(GatewayMessageReceived(OPERATOR, OrderProfile(steps=3, primitives=True)))
    before = len(world.plans)
    world.submit("b", [1, 2, 3], 10)
    world.settle()
    computing = [one for one in world.plans[before:] if one.prefill_chunks or one.decodes]
    assert [one.profile for one in computing[:4]] == ["primitives"] * 3 + [""]


def test_profiles_of_all_ranks_are_reported_for_steps_after_the_queried_one() -> None:
    """An operator gets what each rank has measured, and status has the sums."""
    world = _world(every=1)
    reports: list[ProfilesReported] = []
    world.submit("a", [1, 2, 3], 10)
    world.settle()
    for rank in (0, 1):
        slow = {0: 0.001, 1: 0.004}[rank]
        waits = {0: 0.005, 1: 0.002}[rank]
        found = [_profile(rank, one, {"mlp": slow, "collective": waits}) for one in (1, 2, 3)]
        _report(world, rank, found)
        _report(world, rank, found)  # one that comes again counts once
    for action in world.core.handle(
        GatewayMessageReceived(OPERATOR, QueryProfiles(epoch=1, step_id=1)), world.now_s
    ):
        message = getattr(action, "message", None)
        if isinstance(message, ProfilesReported):
            reports.append(message)
    (report,) = reports
    assert [one.step_id for one in report.steps][:2] == [2, 3]
    assert [len(one.profiles) for one in report.steps][:3] == [2, 2, 0]
    world.tell(GatewayMessageReceived(GATEWAY, QueryStatus()))
    assert world.status is not None
    first, second = world.status.ranks
    assert second.awaited_s == pytest.approx(3 * 0.003)
    assert first.awaited_s == 0.0
    sums = {one.part: (one.runs, round(one.seconds, 6)) for one in second.parts}
    assert sums == {"mlp": (3, 0.012), "collective": (3, 0.006)}


def test_measured_steps_do_not_change_expected_durations() -> None:
    """They take longer than others, and chunk sizes and deadlines follow from durations."""
    measured, plain = _world(every=1), _world(every=0)
    for world in (measured, plain):
        world.submit("a", [1, 2, 3], 10)
        world.settle()
    assert plain.core._batch.timing.decode_ms(1) > 0.0
    assert measured.core._batch.timing.decode_ms(1) == 0.0
