"""Models whose rows have state that cannot be cut: reuse begins at checkpoints only.

The reference rank checks that a state is saved exactly where it is kept, and that a row begins only
where blocks and state exist.
"""

from typing import cast

import pytest

from shared.messages import BlocksRestored, CachedPrefix, RestoreBlocks
from tests.unit.scheduler.cache.cache_requests import (
    PROMPT,
    prefilled_tokens,
    read_metrics,
    run_request,
)
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, RankSetup, completion
from tests.unit.scheduler.support.rank_failures import lose_rank, restart_ranks
from tests.unit.scheduler.support.reference_rank import Block, ReferenceRank
from tests.unit.scheduler.support.world_factory import MakeWorld

Disks = dict[int, dict[bytes, Block]]
CHECKPOINT_BYTES = 300
"""Size of a checkpoint."""


def make_stateful_world(make_world: MakeWorld, **options: object) -> InMemoryWorld:
    """Return a world whose rows have state."""
    disks = cast("Disks", options.pop("disks", {}))
    return make_world(hardware=RankSetup(checkpoint_bytes=CHECKPOINT_BYTES, disks=disks), **options)


def checkpoint_positions(world: InMemoryWorld) -> list[int]:
    """Return the positions of kept checkpoints in order."""
    return [one.position for plan in world.plans for one in plan.keep_checkpoints]


def test_prefill_keeps_checkpoints_at_boundaries_announced_by_request(
    make_world: MakeWorld,
) -> None:
    """Checkpoints are kept at the last block boundary of the system prompt, of each announced
    boundary and of the prompt.

    Prefill stops at each of them, and the next plan keeps the checkpoint.
    """
    world = make_stateful_world(make_world)
    run_request(world, "a", PROMPT, 1, system_tokens=40, cache_boundaries=[60, 70, 79])
    assert checkpoint_positions(world) == [32, 48, 64, 96]
    ends = [chunk.start + chunk.length for plan in world.plans for chunk in plan.prefill_chunks]
    assert ends == [32, 48, 64, 96, 100]
    for before, plan in zip(world.plans, world.plans[1:], strict=False):
        assert len(before.checkpoints) == len(plan.keep_checkpoints)


def test_next_turn_of_conversation_reuses_all_its_whole_blocks(make_world: MakeWorld) -> None:
    """A conversation reuses all of its whole blocks, including answers."""
    world = make_stateful_world(make_world)
    prompt = list(PROMPT)
    run_request(world, "turn 0", prompt, 30)
    for turn in range(1, 6):
        known = (len(prompt) + 30 - 1) // 16 * 16
        prompt += [*completion(prompt, 30), turn, 1, 2]
        assert run_request(world, f"turn {turn}", prompt, 30) == known
        assert world.cached[f"turn {turn}"].miss == ""


def test_prompt_with_changed_history_reuses_last_checkpoint_before_change(
    make_world: MakeWorld,
) -> None:
    """A prompt with changed history reuses the last checkpoint before the change."""
    world = make_stateful_world(make_world)
    run_request(world, "a", PROMPT, 30, cache_boundaries=[70])
    assert run_request(world, "b", [*PROMPT[:75], 998, 997]) == 64
    cached = world.cached["b"]
    assert cached == CachedPrefix(memory_tokens=64, diverged_at=75, miss="diverged")


def test_long_answer_leaves_one_checkpoint_at_its_end(make_world: MakeWorld) -> None:
    """A long answer leaves one checkpoint at its end instead of one per block."""
    world = make_stateful_world(make_world)
    run_request(world, "a", PROMPT[:20], 200)
    assert checkpoint_positions(world) == list(range(16, 220, 16))
    resident = [block for block in next(iter(world.ranks.values())).blocks.values() if block.state]
    assert sorted(block.end for block in resident) == [16, 208]


def test_checkpoint_reused_by_other_request_stays_when_owner_continues(
    make_world: MakeWorld,
) -> None:
    """A checkpoint that another request has reused stays when its owner continues."""
    world = make_stateful_world(make_world)
    world.submit("a", PROMPT[:20], 60)
    while len(world.tokens["a"]) < 33:
        world.step()
    world.submit("b", [*PROMPT[:20], *world.tokens["a"][:30]], 2)
    world.settle()
    used = world.cached["b"].memory_tokens
    assert used == 48
    resident = [block for block in next(iter(world.ranks.values())).blocks.values() if block.state]
    assert {16, used, 64} <= {block.end for block in resident}


def test_requests_sharing_system_prompt_reuse_its_checkpoint_before_first_prompt_ends(
    make_world: MakeWorld,
) -> None:
    """Requests that share a system prompt wait for its checkpoint and not for the whole prompt."""
    world = make_stateful_world(make_world, step_tokens_max=32)
    system = [7 * number % 1_000 for number in range(200)]
    for number in range(4):
        question = [number + 1] * 300
        world.submit(f"r{number}", [*system, *question], 3, system_tokens=200)
    world.settle()
    assert [world.cached[f"r{number}"].memory_tokens for number in range(4)] == [0, 192, 192, 192]
    assert prefilled_tokens(world.plans) == 500 + 3 * 308
    started = {
        entry.sequence_id: n for n, plan in enumerate(world.plans) for entry in plan.admitted
    }
    assert started[2] < len(world.plans) // 3


def test_no_checkpoint_is_taken_when_memory_cannot_hold_one(make_world: MakeWorld) -> None:
    """When memory cannot hold one checkpoint, prefill is not cut for any."""
    world = make_stateful_world(make_world, cache={"resident_bytes_max": 250})
    run_request(world, "a", PROMPT, 30, system_tokens=40, cache_boundaries=[60])
    assert run_request(world, "b", PROMPT, 30, system_tokens=40, cache_boundaries=[60]) == 0
    assert not any(plan.checkpoints for plan in world.plans)
    assert len([plan for plan in world.plans if plan.prefill_chunks]) == 2


def test_checkpoint_inside_conversation_is_evicted_before_blocks_around_it(
    make_world: MakeWorld,
) -> None:
    """A checkpoint inside a conversation is evicted before the blocks around it."""
    world = make_stateful_world(make_world, cache={"resident_bytes_max": 2_400})
    run_request(world, "a", PROMPT, 1, cache_boundaries=[40, 70])
    run_request(world, "b", [5] * 50, 1)
    blocks = next(iter(world.ranks.values())).blocks.values()
    kept = sorted(block.end for block in blocks if block.state)
    assert 32 not in kept
    assert sum(not block.state for block in blocks) > 6
    assert run_request(world, "c", PROMPT, 1) == 96


@pytest.mark.parametrize("ranks", [1, 2])
def test_longest_prefix_with_stored_checkpoint_is_restored_after_restart(
    make_world: MakeWorld, ranks: int
) -> None:
    """After a restart the longest prefix with a checkpoint is restored; only that checkpoint is
    read."""
    disks: Disks = {}
    world = make_stateful_world(make_world, disks=disks, ranks=ranks, cache={"ssd": True})
    run_request(world, "a", PROMPT, 30, system_tokens=40)
    states = [block.end for block in disks[0].values() if block.state]
    assert sorted(states) == [32, 96, 128], "of decode checkpoints only the last one"
    world = make_stateful_world(make_world, disks=disks, ranks=ranks, cache={"ssd": True})
    prompt = [*PROMPT, *completion(PROMPT, 30), 1]
    assert run_request(world, "b", prompt) == 128
    assert world.cached["b"] == CachedPrefix(stored_tokens=128)
    blocks = next(iter(world.ranks.values())).blocks.values()
    assert [block.end for block in blocks if block.state][:1] == [128]


def test_ranks_restoring_different_checkpoints_get_second_order_for_common_one(
    make_world: MakeWorld,
) -> None:
    """When ranks read different checkpoints, a second order names a common one."""
    disks: Disks = {}
    world = make_stateful_world(make_world, disks=disks, ranks=2, cache={"ssd": True})
    run_request(world, "a", PROMPT, 30, system_tokens=40)
    world = make_stateful_world(make_world, disks=disks, ranks=2, cache={"ssd": True})

    def read(rank: ReferenceRank, order: RestoreBlocks) -> tuple[float, BlocksRestored]:
        damaged = order.items[5].checkpoint if rank.rank and len(order.items) > 5 else None
        return 0.0, rank.restore(order, damaged=damaged or b"")

    world.restore_answer = read
    assert run_request(world, "b", PROMPT) == 32
    assert [len(order.items) for order in world.restores] == [6, 2]
    assert world.cached["b"].stored_tokens == 32
    assert world.cached["b"].miss == "unreadable"
    assert run_request(world, "c", PROMPT) == 96


def test_prefix_is_looked_up_again_when_evicted_before_second_restore(
    make_world: MakeWorld,
) -> None:
    """When the blocks before a second order were evicted, the prefix is looked up again."""
    disks: Disks = {}
    world = make_stateful_world(make_world, disks=disks, ranks=2, cache={"ssd": True})
    run_request(world, "a", PROMPT, 30, cache_boundaries=[32, 64, 80])
    world = make_stateful_world(make_world, disks=disks, ranks=2, cache={"ssd": True})
    run_request(world, "b", [*PROMPT[:32], 5], 1)

    def read(rank: ReferenceRank, order: RestoreBlocks) -> tuple[float, BlocksRestored]:
        damaged = order.items[-1].checkpoint if rank.rank and len(order.items) == 4 else None
        return 0.02, rank.restore(order, damaged=damaged or b"")

    world.restore_answer = read
    world.submit("c", PROMPT, 5)
    world.step()
    # As growing rows do.
    assert world.core._batch.cache.state.shrink_to(0)
    world.now_s += 0.03
    world.settle()
    # The third order begins at the start of the text, without blocks known to be missing.
    assert [len(order.items) for order in world.restores] == [2, 4, 5]
    assert world.tokens["c"] == completion(PROMPT, 5)
    assert world.cached["c"].stored_tokens == 80


def test_restore_reads_only_checkpoint_when_its_blocks_are_in_memory(make_world: MakeWorld) -> None:
    """When only the checkpoint was evicted, only the checkpoint is read."""
    world = make_stateful_world(make_world, cache={"ssd": True, "resident_bytes_max": 2_400})
    run_request(world, "a", PROMPT, 1, cache_boundaries=[40, 70])
    run_request(world, "b", [5] * 50, 1)
    world.restores.clear()
    assert run_request(world, "c", [*PROMPT[:40], *[3] * 40], 1) == 32
    assert world.cached["c"].stored_tokens == 32
    assert [item.block for item in world.restores[0].items[:2]] == [None, None]


def test_new_epoch_resumes_sequences_at_last_stored_checkpoint(make_world: MakeWorld) -> None:
    """A new epoch resumes unfinished sequences at their last stored checkpoint."""
    world = make_stateful_world(make_world, cache={"ssd": True})
    world.submit("a", PROMPT, 120)
    while len(world.tokens["a"]) < 60:
        world.step()
    lose_rank(world)
    restart_ranks(world)
    world.settle()
    assert world.tokens["a"] == completion(PROMPT, 120)
    assert read_metrics(world)["cache_hit_tokens_ssd_total"] == 96
