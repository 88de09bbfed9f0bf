"""Restores from SSD: deadlines, partial answers, bounds, and disks that fail."""

import msgspec
import pytest

from services.scheduler.events import RankMessageReceived, TimePassed
from shared.messages import BlocksRestored, BlocksSpilled, CachedPrefix, RestoreBlocks
from tests.unit.scheduler.cache.cache_requests import (
    PROMPT,
    SSD,
    Disks,
    fill_disks,
    prefilled_tokens,
    read_metrics,
    restart_world,
    run_request,
)
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, RankSetup, completion
from tests.unit.scheduler.support.reference_rank import ReferenceRank
from tests.unit.scheduler.support.world_factory import MakeWorld


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_whole_blocks_of_prompt_are_restored_from_ssd_after_restart(
    make_world: MakeWorld, ranks: int
) -> None:
    """After a restart of all processes, all whole blocks of a prompt come from SSD."""
    disks = fill_disks(make_world, ranks=ranks)
    assert all(len(disk) == 7 for disk in disks.values()), "119 tokens are seven whole blocks"
    world = restart_world(make_world, disks, ranks=ranks)
    assert run_request(world, "a", PROMPT) == 96
    assert world.cached["a"] == CachedPrefix(stored_tokens=96)
    assert prefilled_tokens(world.plans) == 4
    assert run_request(world, "b", PROMPT) == 99
    assert world.cached["b"] == CachedPrefix(memory_tokens=99)
    assert len(world.restores) == 1


def test_restore_from_ssd_delays_only_its_own_request(make_world: MakeWorld) -> None:
    """While a disk reads, running requests continue and later requests pass the waiting one."""
    world = restart_world(make_world, fill_disks(make_world))
    long = [7 * number % 1_000 for number in range(800)]
    run_request(world, "learn", long)
    world = restart_world(make_world, world.hardware.disks)
    run_request(world, "learn", [1] * 800)
    world.restore_answer = lambda rank, order: (0.2, rank.restore(order))
    world.submit("running", [1, 2, 3], 200)
    world.step()
    world.submit("a", long, 5)
    world.submit("b", [4, 5, 6], 5)
    for _ in range(15):
        world.step()
    assert len(world.tokens["running"]) > 10
    assert "b" in world.ends
    assert "a" not in world.cached
    world.settle()
    assert world.cached["a"].stored_tokens == 799


def test_restored_prefix_ends_at_block_unreadable_by_one_rank(make_world: MakeWorld) -> None:
    """A block that one rank cannot read ends the prefix on all ranks, and the miss names the
    cause."""
    disks = fill_disks(make_world, ranks=2)
    world = restart_world(make_world, disks, ranks=2)
    victim: list[bytes] = []

    def read(rank: ReferenceRank, order: RestoreBlocks) -> tuple[float, BlocksRestored]:
        victim.append(order.items[3].block or b"")
        return 0.0, rank.restore(order, damaged=victim[0] if rank.rank == 1 else b"")

    world.restore_answer = read
    assert run_request(world, "a", PROMPT) == 48
    assert world.cached["a"] == CachedPrefix(stored_tokens=48, miss="unreadable")
    assert victim[0] in disks[1], "the computed block is stored again"


def test_restore_slower_than_prefill_counts_as_cache_miss(make_world: MakeWorld) -> None:
    """A restore that takes longer than computing counts as a miss, and its late answer is
    dropped."""
    world = restart_world(make_world, fill_disks(make_world))
    world.restore_answer = lambda rank, order: (20.0, rank.restore(order))
    world.submit("a", PROMPT, 5)
    assert world.restores[0].deadline_s == 10.0, "the speed of prefill is not known yet"
    while "a" not in world.ends:
        world.tell(TimePassed())
        world.step()
    assert world.cached["a"] == CachedPrefix(miss="slow")
    world.settle()
    assert world.tokens["a"] == completion(PROMPT, 5)
    rank = next(iter(world.ranks.values()))
    assert rank.open_restores == 0
    assert not any(adopted.count for plan in world.plans for adopted in plan.adopted)


def test_request_starts_no_second_restore_after_late_partial_answer(make_world: MakeWorld) -> None:
    """After a late, partial answer the same request starts no second restore."""
    world = restart_world(make_world, fill_disks(make_world))

    def read(rank: ReferenceRank, order: RestoreBlocks) -> tuple[float, BlocksRestored]:
        staged = [(item.block or b"", rank.disk[item.block or b""]) for item in order.items[:2]]
        return order.deadline_s, rank.answer(order, 2, "late", staged)

    world.restore_answer = read
    assert run_request(world, "a", PROMPT) == 32
    assert len(world.restores) == 1
    assert world.cached["a"] == CachedPrefix(stored_tokens=32, miss="slow")


def test_preempted_sequence_resumes_from_memory_instead_of_second_restore_from_ssd(
    make_world: MakeWorld,
) -> None:
    """A preempted sequence that returns reuses its restored blocks in memory instead of SSD."""
    disks: Disks = {}
    world = restart_world(make_world, disks)
    for number in range(2):
        run_request(world, f"before {number}", [number + 1] * 100)
    world = make_world(
        hardware=RankSetup(kv_tokens=900, disks=disks), kv_row_growth_tokens=16, cache=SSD
    )
    for number in range(2):
        world.submit(f"r{number}", [number + 1] * 100, 400)
    world.settle()
    seen = read_metrics(world)
    assert seen["preemptions_total"] == 1
    assert seen["cache_hit_tokens_ssd_total"] == 2 * 96
    assert seen["cache_hit_tokens_memory_total"] > 200


def test_restore_deadline_equals_predicted_prefill_time(make_world: MakeWorld) -> None:
    """A restore may take as long as the prefill, at least 0.05 s; very short prefixes are not
    restored.

    The reference rank takes 5 ms plus 0.5 ms per token for a prefill.
    """
    world = restart_world(make_world, {})
    run_request(world, "learn", [1] * 2_000)
    run_request(world, "long", [2] * 2_000)
    assert 0.8 < world.restores[-1].deadline_s < 1.5
    run_request(world, "short", [3] * 60)
    assert world.restores[-1].deadline_s == 0.05
    count = len(world.restores)
    run_request(world, "trifle", [4] * 15)
    assert len(world.restores) == count


def test_restore_deadline_is_120_s_when_receipt_reports_step_of_years(
    make_world: MakeWorld,
) -> None:
    """After a receipt that reports years for a step, the next restore order has a deadline of 120
    s.
    """
    world = restart_world(make_world, {})
    world.change_receipt = lambda receipt: msgspec.structs.replace(receipt, busy_ms=1e12)
    run_request(world, "learn", [1] * 2_000)
    run_request(world, "long", [2] * 2_000)
    assert world.restores[-1].deadline_s == 120.0


def test_prefix_absent_from_store_is_requested_only_once(make_world: MakeWorld) -> None:
    """An unknown prefix is requested once; afterwards the index knows that it is not stored."""
    world = make_world(cache={"ssd": True, "resident_bytes_max": 2_000})
    world.accepts_spill = lambda rank, name: False
    run_request(world, "a", PROMPT)
    assert len(world.restores) == 1
    assert world.cached["a"].miss == "new", "a restore order alone does not make the prefix known"
    for number in range(4):
        run_request(world, f"other {number}", [number + 1] * 150)
    count = len(world.restores)
    assert run_request(world, "b", PROMPT) == 0
    assert len(world.restores) == count


def test_requests_with_equal_stored_prefix_share_one_restore(make_world: MakeWorld) -> None:
    """Four requests with one stored prefix cause one restore."""
    world = restart_world(make_world, fill_disks(make_world))
    world.restore_answer = lambda rank, order: (0.5, rank.restore(order))
    for number in range(4):
        world.submit(f"r{number}", [*PROMPT[:90], number, 1], 3)
    world.settle()
    assert len(world.restores) == 1
    assert world.cached["r0"].stored_tokens == 80
    assert [world.cached[f"r{n}"].memory_tokens for n in (1, 2, 3)] == [90, 90, 90] or [
        world.cached[f"r{n}"].memory_tokens for n in (1, 2, 3)
    ] == [80, 80, 80]


@pytest.mark.parametrize("when", ["before", "after"])
def test_blocks_restored_for_aborted_request_are_reused_by_next_request(
    make_world: MakeWorld, when: str
) -> None:
    """Blocks restored for an aborted request are adopted for the next request, and no reference
    remains."""
    world = restart_world(make_world, fill_disks(make_world))
    world.restore_answer = lambda rank, order: (0.5, rank.restore(order))
    world.submit("a", PROMPT, 5)
    if when == "after":
        world.now_s += 0.5
    world.abort("a")
    world.settle()
    assert run_request(world, "b", PROMPT) == 96
    assert len(world.restores) == 1
    assert world.cached["b"].memory_tokens == 96


def restart_with_stored_prompts(make_world: MakeWorld) -> tuple[InMemoryWorld, list[list[int]]]:
    """Return a restarted world and 20 prompts that are stored on its disks."""
    disks: Disks = {}
    world = restart_world(make_world, disks)
    texts = [[number + 1] * 100 for number in range(20)]
    for number, text in enumerate(texts):
        run_request(world, f"before {number}", text)
    return restart_world(make_world, disks), texts


def test_requests_sharing_unanswered_restore_continue_at_its_deadline(
    make_world: MakeWorld,
) -> None:
    """Requests that share an unanswered restore continue at its deadline, and the rank gets no
    further restore."""
    world = restart_world(make_world, fill_disks(make_world))
    world.restore_answer = lambda rank, order: (100.0, rank.restore(order))
    world.submit("a", PROMPT, 5)
    world.submit("twin", PROMPT, 5)
    world.abort("a")
    world.now_s += 10.1
    world.tell(TimePassed())
    for _ in range(10):
        world.step()
    assert world.tokens["twin"] == completion(PROMPT, 5)
    run_request(world, "later", [9] * 100)
    assert len(world.restores) == 1, "a rank with an open answer gets no restore"
    world.now_s += 100.0
    world.settle()
    run_request(world, "last", [8] * 100)
    assert len(world.restores) == 2


def test_scheduler_has_at_most_eight_open_restores(make_world: MakeWorld) -> None:
    """At most eight restores are open; other requests wait for their turn."""
    world, texts = restart_with_stored_prompts(make_world)
    open_max = 0

    def read(rank: ReferenceRank, order: RestoreBlocks) -> tuple[float, BlocksRestored]:
        nonlocal open_max
        open_max = max(open_max, len(world._answers) + 1)
        return 0.03, rank.restore(order)

    world.restore_answer = read
    for number, text in enumerate(texts):
        world.submit(f"r{number}", text, 3)
    world.settle()
    assert open_max == 8
    assert [world.cached[f"r{number}"].stored_tokens for number in range(20)] == [96] * 20
    assert all(world.tokens[f"r{n}"] == completion(text, 3) for n, text in enumerate(texts))


def test_request_waits_behind_hanging_restores_no_longer_than_prefill(
    make_world: MakeWorld,
) -> None:
    """Restores that hang delay other requests no longer than computing would take."""
    world, texts = restart_with_stored_prompts(make_world)
    world.restore_answer = lambda rank, order: (100.0, rank.restore(order))
    for number, text in enumerate(texts):
        world.submit(f"r{number}", text, 3)
    began_s = world.now_s
    while len(world.ends) < 20:
        world.step()
        world.tell(TimePassed())
        assert world.now_s < began_s + 25.0, "twice the 10 s of a model whose speed is unknown"
    assert {cached.miss for cached in world.cached.values()} == {"slow"}
    world.settle()


def test_no_restore_is_ordered_for_10_s_after_store_answers_off(make_world: MakeWorld) -> None:
    """After an answer `off` no restore is ordered for 10 s."""
    world = restart_world(make_world, {})
    world.restore_answer = lambda rank, order: (0.0, rank.answer(order, 0, "off"))
    world.accepts_spill = lambda rank, name: False
    for number in range(5):
        run_request(world, f"r{number}", [number + 1] * 100)
    assert len(world.restores) == 1
    world.now_s += 11.0
    run_request(world, "later", [9] * 100)
    assert len(world.restores) == 2


def test_unrequested_store_answers_are_ignored_and_counted(make_world: MakeWorld) -> None:
    """Answers of unknown restores and blocks, repeated or of another epoch, are ignored and
    counted."""
    world = restart_world(make_world, {})
    run_request(world, "a", PROMPT)
    before = {name: value for name, value in read_metrics(world).items() if "refused" not in name}
    peer, rank = next(iter(world.ranks.items()))
    for epoch in (rank.epoch, 7):
        world.tell(
            RankMessageReceived(
                peer,
                BlocksRestored(
                    epoch=epoch,
                    rank=0,
                    restore_id=99,
                    count=3,
                    stopped_by="",
                    bytes_read=1,
                    read_ms=1.0,
                ),
            )
        )
        spilled = BlocksSpilled(
            epoch=epoch, rank=0, stored=[b"x" * 32], lost=[b"y" * 32], store_bytes=6
        )
        world.tell(RankMessageReceived(peer, spilled))
    after = read_metrics(world)
    ignored = ("cache_restore_answers_refused_total", "stale_receipts_total")
    assert {name: after[name] for name in before if name not in ignored} == before
    assert after["cache_restore_answers_refused_total"] == 1
    assert run_request(world, "b", PROMPT) == 99
