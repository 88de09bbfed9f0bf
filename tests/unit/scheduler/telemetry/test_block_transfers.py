"""The history of block transfers: restores and spills of each rank, with their requests."""

from tests.unit.scheduler.cache.cache_requests import (
    PROMPT,
    fill_disks,
    restart_world,
    run_request,
)
from tests.unit.scheduler.support.world_factory import MakeWorld


def test_restore_and_spills_of_both_ranks_are_recorded(make_world: MakeWorld) -> None:
    """A restore names its request; spills have their blocks, and end after they were ordered."""
    world = restart_world(make_world, fill_disks(make_world, ranks=2), ranks=2)
    began_s = world.now_s
    world.restore_answer = lambda rank, order: (0.02, rank.restore(order))
    run_request(world, "a", PROMPT)
    run_request(world, "b", [5, *PROMPT])
    found = world.core._telemetry.block_transfers.report(began_s)
    restores = [one for one in found if one.kind == "restore"]
    assert [(one.rank, one.request_id, one.blocks, one.failed_blocks) for one in restores] == [
        (0, "a", 6, 0),
        (1, "a", 6, 0),
        # No store has these, as the answers tell.
        (0, "b", 0, 6),
        (1, "b", 0, 6),
    ]
    assert all(one.ended_at_s - one.ordered_at_s >= 0.02 for one in restores)
    spills = [one for one in found if one.kind == "spill"]
    assert {one.rank for one in spills} == {0, 1}
    assert sum(one.blocks for one in spills if one.rank == 0) == 6
    assert all(began_s <= one.ordered_at_s <= one.ended_at_s for one in spills)
    assert world.core._telemetry.block_transfers.report(world.now_s) == []


def test_lost_blocks_are_counted_as_failed(make_world: MakeWorld) -> None:
    """A store that takes none stores none."""
    world = restart_world(make_world, {})
    world.accepts_spill = lambda rank, name: False
    run_request(world, "a", PROMPT)
    found = [
        one for one in world.core._telemetry.block_transfers.report(0.0) if one.kind == "spill"
    ]
    assert found
    assert sum(one.blocks for one in found) == 0
    assert sum(one.failed_blocks for one in found) >= 6
