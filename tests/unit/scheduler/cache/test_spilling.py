"""Spills to SSD: their order, their bounds, and stores that refuse or hang."""

import pytest

from services.scheduler.events import DrainRequested, TimePassed
from tests.unit.scheduler.cache.cache_requests import (
    PROMPT,
    read_metrics,
    restart_world,
    run_request,
)
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld
from tests.unit.scheduler.support.world_factory import MakeWorld


def test_store_that_refused_blocks_is_offered_only_one_after_10_s(make_world: MakeWorld) -> None:
    """A store that refused blocks gets none for 10 s and then one; when it accepts that, all
    follow.
    """
    world = restart_world(make_world, {})
    world.accepts_spill = lambda rank, name: False
    run_request(world, "a", PROMPT)
    for _ in range(3):
        world.now_s += 10.5
        world.tell(TimePassed())
        world.settle()
    orders = [len(plan.spill.hashes) for plan in world.plans if plan.spill is not None]
    assert orders[0] == 6
    run_request(world, "b", [5] * 100)
    world.accepts_spill = lambda rank, name: True
    for _ in range(4):
        world.now_s += 10.5
        world.tell(TimePassed())
        world.settle()
    orders = [len(plan.spill.hashes) for plan in world.plans if plan.spill is not None]
    assert orders[1] == 1
    assert read_metrics(world)["cache_blocks_spilled_total"] >= 6


def test_block_counts_as_stored_only_when_all_ranks_wrote_it(make_world: MakeWorld) -> None:
    """A write that one rank has lost makes the block unknown to SSD on all ranks."""
    world = restart_world(make_world, {}, ranks=2)
    world.accepts_spill = lambda rank, name: rank.rank == 0
    run_request(world, "a", PROMPT)
    seen = read_metrics(world)
    assert seen.get("cache_blocks_spilled_total", 0.0) == 0.0
    assert seen["cache_blocks_spill_lost_total"] == 6


@pytest.mark.proof
def test_blocks_being_written_to_ssd_stay_within_spill_bytes_max(make_world: MakeWorld) -> None:
    """At most `spill_bytes_max` bytes are being written; every block is spilled once."""
    world = make_world(
        kv_tokens=10**6, context=300_000, cache={"ssd": True, "spill_bytes_max": 2**20}
    )
    ordered: list[bytes] = []
    world.submit("a", [7 * n % 1_000 for n in range(150_000)], 2)
    peer = next(iter(world.ranks))
    while world.rank_step(peer) or world._answers:
        world.deliver_answers()
        world.now_s += 0.01
        world.tell(TimePassed())
        rank = world.ranks[peer]
        assert len(rank.spills) * 160 <= 2**20
    world.settle()
    for plan in world.plans:
        ordered += plan.spill.hashes if plan.spill is not None else []
    assert len(ordered) == len(set(ordered)) == 150_000 // 16
    assert read_metrics(world)["cache_blocks_spilled_total"] == 150_000 // 16


def test_spill_order_after_eviction_by_store_names_blocks_to_evict_first(
    make_world: MakeWorld,
) -> None:
    """After a store has evicted, spill orders name the least valuable blocks to evict first,
    children first.
    """
    world = restart_world(make_world, {})
    run_request(world, "old", [1] * 40)
    run_request(world, "new", [2] * 40)
    disk = world.hardware.disks[0]
    before = list(disk)
    for name in list(disk)[:2]:
        del disk[name]
    run_request(world, "more", [3] * 40)
    assert not any(plan.spill.evict_first for plan in world.plans if plan.spill)
    run_request(world, "most", [4] * 40)
    named = [plan.spill.evict_first for plan in world.plans if plan.spill][-1]
    assert named[:2] == [before[1], before[0]]


def test_no_block_is_spilled_or_restored_when_ssd_is_off(make_world: MakeWorld) -> None:
    """With `cache.ssd` off, blocks exist in memory only."""
    world = make_world(cache={"ssd": False})
    run_request(world, "a", PROMPT)
    assert run_request(world, "b", PROMPT) == 99
    assert not world.restores
    assert not any(plan.spill for plan in world.plans)


def test_scheduler_stops_only_after_last_blocks_are_on_ssd(make_world: MakeWorld) -> None:
    """The blocks of the last request are on SSD before the scheduler stops."""
    world = restart_world(make_world, {})
    world.submit("a", PROMPT, 5)
    world.tell(DrainRequested())
    while "a" not in world.ends:
        assert world.exit_code is None
        world.step()
    for _ in range(5):
        world.step()
        world.tell(TimePassed())
    assert world.exit_code == 0
    assert len(world.hardware.disks[0]) == 6


def test_hanging_store_delays_scheduler_stop_5_s_at_most(make_world: MakeWorld) -> None:
    """After 5 s without requests the scheduler stops, written or not."""
    world = restart_world(make_world, {})
    world.submit("a", PROMPT, 5)
    world.deliver_answers()
    world.tell(DrainRequested())
    peer = next(iter(world.ranks))
    while world.rank_step(peer) or "a" not in world.ends:
        world.deliver_answers()
    world.tell(TimePassed())
    assert world.exit_code is None
    world.now_s += 5.1
    world.tell(TimePassed())
    assert world.exit_code == 0


def _pass_time(world: InMemoryWorld, seconds: float) -> None:
    world.now_s += seconds
    world.tell(TimePassed())
    world.settle()


def test_blocks_unused_for_their_time_to_live_leave_memory_and_index(
    make_world: MakeWorld,
) -> None:
    """An idle world evicts and forgets blocks that were unused for `cache.ttl_days`."""
    world = make_world(cache={"ssd": False, "ttl_days": 1.0})
    run_request(world, "a", PROMPT)
    run_request(world, "b", [7] * 100)
    _pass_time(world, 50_000.0)
    assert run_request(world, "c", PROMPT) == 99

    _pass_time(world, 50_000.0)

    seen = read_metrics(world)
    assert 0 < seen["cache_blocks_known"] == seen["cache_blocks_resident"] < 9
    assert run_request(world, "d", [7] * 100) == 0
    assert world.cached["d"].miss == "new", "its tokens are forgotten too"
    assert run_request(world, "e", PROMPT) == 99
    _pass_time(world, 90_000.0)
    assert read_metrics(world)["cache_blocks_known"] == 0
    assert not any(rank.resident_bytes for rank in world.ranks.values())


def test_block_used_in_memory_is_stored_again_before_stores_delete_it(
    make_world: MakeWorld,
) -> None:
    """Stores do not see uses in memory, so that the block is written again within half of its time
    to live."""
    world = make_world(cache={"ssd": True, "ttl_days": 1.0})
    run_request(world, "a", PROMPT)
    _pass_time(world, 40_000.0)
    before = read_metrics(world)["cache_blocks_spilled_total"]
    run_request(world, "b", PROMPT)
    assert read_metrics(world)["cache_blocks_spilled_total"] == before
    _pass_time(world, 10_000.0)

    run_request(world, "c", PROMPT)

    assert read_metrics(world)["cache_blocks_spilled_total"] >= before + 6
