"""Conversations with shared prefixes on slow, failing ranks with failing disks.

The reference rank checks every plan: the KV of each reused token is that of the prompt; blocks are
reused, kept, spilled, adopted and evicted only where they exist; memory suffices. A failure is
repeated by its seed.
"""

import random
from collections.abc import Callable

import pytest

from services.scheduler.cache.index import block_format
from services.scheduler.cache.index.block_index import NODES_MAX
from services.scheduler.events import TimePassed
from shared import limits
from shared.messages import BlocksRestored, RequestFinished, RestoreBlocks
from tests.simulation.checks.plan_limits import FORWARD_LIMITS, check_plan_sizes
from tests.support.effort import cases
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, RankSetup, completion
from tests.unit.scheduler.support.rank_failures import lose_rank, restart_ranks
from tests.unit.scheduler.support.reference_rank import Block, ReferenceRank
from tests.unit.scheduler.support.world_factory import MakeWorld

PLACES = (NODES_MAX, 60, 20)
"""Places for blocks in the index; with few of them it is full of resident blocks."""


class Clients:
    """Conversations that grow, are cut and share prefixes, with the expected tokens of each
    request."""

    def __init__(self, world: InMemoryWorld, rng: random.Random) -> None:
        self.requests: dict[str, tuple[list[int], int, tuple[int, ...]]] = {}
        self.aborted: set[str] = set()
        self._world = world
        self._rng = rng
        self._systems = [self._text(90), self._text(33), self._text(200)]
        self._conversations: list[list[int]] = []

    def submit(self, name: str) -> None:
        """Submit the next turn of a conversation, or the first of a new one."""
        rng = self._rng
        salt = rng.choice(["", "", "tenant"])
        system = rng.choice(self._systems)
        if self._conversations and rng.random() < 0.6:
            prompt = list(rng.choice(self._conversations))
            if rng.random() < 0.3:
                prompt = prompt[: rng.randrange(1, len(prompt) + 1)]
        else:
            prompt = list(system)
        question = len(prompt)
        prompt += self._text(rng.choice([1, 7, 20, 60]))
        length = rng.randrange(1, 50)
        stops = tuple(completion(prompt, length)[-3:-2]) if rng.random() < 0.3 else ()
        self.requests[name] = prompt, length, stops
        self._conversations.append(prompt + completion(prompt, length, stops))
        self._world.submit(
            name,
            prompt,
            length,
            stop_ids=list(stops),
            priority=rng.randrange(3),
            cache_salt=salt,
            system_tokens=len(system) if prompt[: len(system)] == system else 0,
            cache_boundaries=[question, len(prompt)],
        )

    def abort(self, recent: int = 0) -> None:
        """Abort a request, ended or not; `recent` > 0 chooses among the last requests only."""
        name = self._rng.choice(list(self.requests)[-recent:])
        self.aborted.add(name)
        self._world.abort(name)

    def check_results(self) -> None:
        """Check that every request got exactly the tokens of an undisturbed run."""
        for name, (prompt, length, stops) in self.requests.items():
            expected = completion(prompt, length, stops)
            end = self._world.ends[name]
            assert isinstance(end, RequestFinished), end
            if end.finish_reason == "abort":
                assert name in self.aborted
                assert self._world.tokens[name] == expected[: len(self._world.tokens[name])]
            else:
                assert self._world.tokens[name] == expected
            cached = end.cached
            assert cached.memory_tokens + cached.stored_tokens < len(prompt)

    def _text(self, tokens: int) -> list[int]:
        return [self._rng.randrange(1_000) for _ in range(tokens)]


def faulty_restore(
    rng: random.Random, kind: str
) -> Callable[[ReferenceRank, RestoreBlocks], tuple[float, BlocksRestored]]:
    """Return how ranks answer restores with this kind of disk fault."""

    def read(rank: ReferenceRank, order: RestoreBlocks) -> tuple[float, BlocksRestored]:
        if kind == "slow" and rng.random() < 0.5:
            return 3.0 * order.deadline_s, rank.restore(order)
        if kind == "unequal" and rng.random() < 0.5:
            damaged = rng.choice(order.items)
            return 0.0, rank.restore(order, damaged.block or damaged.checkpoint or b"")
        if kind == "late":
            return order.deadline_s, rank.answer(order, 0, "late")
        if kind == "off" and rng.random() < 0.7:
            return 0.0, rank.answer(order, 0, "off")
        if kind == "lossy" and rng.random() < 0.3:
            for item in order.items:
                rank.disk.pop(item.block or b"", None)
        return 0.02 * rng.random(), rank.restore(order)

    return read


def lossy_spill(rng: random.Random, share: float) -> Callable[[ReferenceRank, bytes], bool]:
    """Return whether a store takes a block: a fraction `share` of them is lost."""
    return lambda rank, name: rng.random() >= share


def run_steps(world: InMemoryWorld, clients: Clients, rng: random.Random, losses: float) -> None:
    """Run 150 steps with random requests, aborts, lost ranks, restores and spills."""
    for step in range(150):
        if rng.random() < 0.3:
            clients.submit(f"r{step}")
        if clients.requests and rng.random() < 0.1:
            clients.abort()
        if rng.random() < losses:
            lose_rank(world, rng.choice(list(world.ranks)))
            restart_ranks(world)
        for peer in rng.sample(list(world.ranks), len(world.ranks)):
            if rng.random() < 0.8:
                world.rank_step(peer)
            if rng.random() < 0.3:
                world.write_spills(peer)
        world.deliver_answers()
        world.now_s += 0.01
        if rng.random() < 0.2:
            world.tell(TimePassed())
    world.settle()


@pytest.mark.deep
@pytest.mark.parametrize("state_bytes", [0, 160], ids=["plain", "checkpoints"])
@pytest.mark.parametrize("seed", range(cases(3, 12)))
def test_requests_get_tokens_of_undisturbed_run_under_cache_faults(
    make_world: MakeWorld, seed: int, state_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request gets the tokens of an undisturbed run while blocks are reused, evicted and
    lost."""
    monkeypatch.setattr(limits, "FORWARD_TOKENS_MAX", FORWARD_LIMITS[seed % 3])
    monkeypatch.setattr(block_format, "NODES_MAX", PLACES[seed % 3])
    rng = random.Random(seed)
    disks: dict[int, dict[bytes, Block]] = {}
    hits = 0.0
    for _ in range(2):
        hardware = RankSetup(
            kv_tokens=rng.choice([1_200, 4_000, 50_000]),
            checkpoint_bytes=state_bytes,
            disks=disks,
        )
        world = make_world(
            ranks=rng.choice([1, 2, 3]),
            hardware=hardware,
            running_sequences_max=rng.choice([1, 3, 8]),
            kv_row_growth_tokens=rng.choice([16, 64]),
            step_tokens_max=rng.choice([32, 256, 2_048]),
            plans_in_flight=rng.choice([1, 2]),
            cache={
                "block_tokens": rng.choice([16, 32]),
                "ssd": rng.random() < 0.7,
                "resident_bytes_max": rng.choice([0, 0, 2_000, 10**6]),
            },
        )
        world.restore_answer = faulty_restore(
            rng, rng.choice(["", "", "slow", "unequal", "late", "off", "lossy"])
        )
        world.accepts_spill = lossy_spill(rng, rng.choice([0.0, 0.0, 0.3, 1.0]))
        clients = Clients(world, rng)
        run_steps(world, clients, rng, losses=rng.choice([0.0, 0.02]))
        clients.check_results()
        check_plan_sizes(world.plans, world.config.scheduler.step_tokens_max)
        world.now_s += 2.0
        world.tell(TimePassed())
        assert world.status is not None
        hits += world.status.counters["cache_hit_tokens_memory_total"]
    assert hits > 0.0, "no tokens were reused"


@pytest.mark.deep
@pytest.mark.parametrize("state_bytes", [0, 160], ids=["plain", "checkpoints"])
def test_no_block_reference_or_row_remains_after_random_requests(
    make_world: MakeWorld, state_bytes: int
) -> None:
    """After 1,000 random requests with many aborts, no reference, restore or row remains, and the
    ranks' blocks equal the index."""
    rng = random.Random(7)
    world = make_world(
        ranks=2,
        hardware=RankSetup(kv_tokens=6_000, checkpoint_bytes=state_bytes),
        kv_row_growth_tokens=64,
        cache={"ssd": True},
    )
    world.restore_answer = faulty_restore(rng, "unequal")
    clients = Clients(world, rng)
    requests = cases(100, 400)
    for number in range(requests):
        clients.submit(f"r{number}")
        for _ in range(rng.randrange(4)):
            world.step()
        if rng.random() < 0.4:
            clients.abort(recent=4)
    world.settle()
    clients.check_results()
    assert len([end for end in world.ends.values() if _is_abort(end)]) > requests / 4
    cache = world.core._batch.cache
    assert len(cache.state.pins) == 0
    assert len(cache.restorer._open) == 0
    assert not cache.spiller.is_busy
    assert not any(rank.rows or rank.open_restores for rank in world.ranks.values())
    world.compare_blocks()
    assert all(rank.resident_bytes <= 30_000 for rank in world.ranks.values())


def _is_abort(end: object) -> bool:
    return isinstance(end, RequestFinished) and end.finish_reason == "abort"
