"""Conversations that share prefixes, on ranks that lag and are lost, with disks that fail.

The reference rank checks every plan: that each reused token's KV is that of the prompt, that only
what is there is reused, kept, spilled, adopted and evicted, and that memory suffices. One seed is
one run; a failure is replayed by its number.
"""

import random
from collections.abc import Callable, Iterator

import pytest

from services.scheduler.events import RankLost, TimePassed
from shared import limits
from shared.messages import BlocksRestored, RequestFinished, RestoreBlocks
from tests.effort import cases
from tests.simulation.checks.plan_limits import FORWARDS, check_sizes
from tests.unit.scheduler.in_memory_world import Hardware, World, completion
from tests.unit.scheduler.reference_rank import Block, ReferenceRank
from tests.unit.scheduler.world_factory import worlds

MakeWorld = Callable[..., World]


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    """Build worlds; at teardown every accepted request has ended and the state agrees."""
    with worlds() as make:
        yield make


class Clients:
    """Conversations that grow, are cut, and begin alike; what each request must generate."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.wanted: dict[str, tuple[list[int], int, tuple[int, ...]]] = {}
        self.aborted: set[str] = set()
        self._world = world
        self._chance = chance
        self._systems = [self._text(90), self._text(33), self._text(200)]
        self._conversations: list[list[int]] = []

    def ask(self, name: str) -> None:
        """Submit the next turn of some conversation, or the first of a new one."""
        chance = self._chance
        salt = chance.choice(["", "", "tenant"])
        system = chance.choice(self._systems)
        if self._conversations and chance.random() < 0.6:
            prompt = list(chance.choice(self._conversations))
            if chance.random() < 0.3:
                prompt = prompt[: chance.randrange(1, len(prompt) + 1)]
        else:
            prompt = list(system)
        question = len(prompt)
        prompt += self._text(chance.choice([1, 7, 20, 60]))
        length = chance.randrange(1, 50)
        stops = tuple(completion(prompt, length)[-3:-2]) if chance.random() < 0.3 else ()
        self.wanted[name] = prompt, length, stops
        self._conversations.append(prompt + completion(prompt, length, stops))
        self._world.submit(
            name,
            prompt,
            length,
            stop_ids=list(stops),
            priority=chance.randrange(3),
            cache_salt=salt,
            system_tokens=len(system) if prompt[: len(system)] == system else 0,
            cache_boundaries=[question, len(prompt)],
        )

    def abort(self, recent: int = 0) -> None:
        """Abort some request, ended or not; with `recent` one of so many last ones."""
        name = self._chance.choice(list(self.wanted)[-recent:])
        self.aborted.add(name)
        self._world.abort(name)

    def check(self) -> None:
        """Assert that everybody got exactly the tokens of an undisturbed run."""
        for name, (prompt, length, stops) in self.wanted.items():
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
        return [self._chance.randrange(1_000) for _ in range(tokens)]


def trouble(
    chance: random.Random, kind: str
) -> Callable[[ReferenceRank, RestoreBlocks], tuple[float, BlocksRestored]]:
    """Return how a rank answers restores when something is wrong with its disk."""

    def read(rank: ReferenceRank, order: RestoreBlocks) -> tuple[float, BlocksRestored]:
        if kind == "slow" and chance.random() < 0.5:
            return 3.0 * order.deadline_s, rank.restore(order)
        if kind == "unequal" and chance.random() < 0.5:
            damaged = chance.choice(order.items)
            return 0.0, rank.restore(order, damaged.block or damaged.checkpoint or b"")
        if kind == "late":
            return order.deadline_s, rank.answer(order, 0, "late")
        if kind == "off" and chance.random() < 0.7:
            return 0.0, rank.answer(order, 0, "off")
        if kind == "lossy" and chance.random() < 0.3:
            for item in order.items:
                rank.disk.pop(item.block or b"", None)
        return 0.02 * chance.random(), rank.restore(order)

    return read


def losing_writes(chance: random.Random, part: float) -> Callable[[ReferenceRank, bytes], bool]:
    """Return whether a store takes a block: `part` of them are lost."""
    return lambda rank, name: chance.random() >= part


def play(world: World, clients: Clients, chance: random.Random, losses: float) -> None:
    """Let 150 steps pass in which anything may happen."""
    ranks = world.config.world.size
    for step in range(150):
        if chance.random() < 0.3:
            clients.ask(f"r{step}")
        if clients.wanted and chance.random() < 0.1:
            clients.abort()
        if chance.random() < losses:
            victim = chance.choice(list(world.ranks))
            world.ranks.pop(victim)
            world.tell(RankLost(victim, "killed"))
            for rank in range(ranks):
                world.start_rank(rank)
        for peer in chance.sample(list(world.ranks), len(world.ranks)):
            if chance.random() < 0.8:
                world.rank_step(peer)
            if chance.random() < 0.3:
                world.write_spills(peer)
        world.deliver_restores()
        world.now_s += 0.01
        if chance.random() < 0.2:
            world.tell(TimePassed())
    world.settle()


@pytest.mark.deep
@pytest.mark.parametrize("state_bytes", [0, 160], ids=["plain", "checkpoints"])
@pytest.mark.parametrize("seed", range(cases(3, 24)))
def test_conversations(
    make_world: MakeWorld, seed: int, state_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request gets its own tokens, whatever is reused, evicted, restored, lost or late."""
    monkeypatch.setattr(limits, "FORWARD_TOKENS_MAX", FORWARDS[seed % 3])
    chance = random.Random(seed)
    disks: dict[int, dict[bytes, Block]] = {}
    hits = 0.0
    for _ in range(2):
        hardware = Hardware(
            kv_tokens=chance.choice([1_200, 4_000, 50_000]),
            checkpoint_bytes=state_bytes,
            disks=disks,
        )
        world = make_world(
            ranks=chance.choice([1, 2, 3]),
            hardware=hardware,
            running_sequences_max=chance.choice([1, 3, 8]),
            kv_row_growth_tokens=chance.choice([16, 64]),
            step_tokens_max=chance.choice([32, 256, 2_048]),
            plans_in_flight=chance.choice([1, 2]),
            cache={
                "block_tokens": chance.choice([16, 32]),
                "ssd": chance.random() < 0.7,
                "resident_bytes_max": chance.choice([0, 0, 2_000, 10**6]),
            },
        )
        world.read = trouble(
            chance, chance.choice(["", "", "slow", "unequal", "late", "off", "lossy"])
        )
        world.write = losing_writes(chance, chance.choice([0.0, 0.0, 0.3, 1.0]))
        clients = Clients(world, chance)
        play(world, clients, chance, losses=chance.choice([0.0, 0.02]))
        clients.check()
        check_sizes(world.plans, world.config.scheduler.step_tokens_max)
        world.now_s += 2.0
        world.tell(TimePassed())
        assert world.status is not None
        hits += world.status.counters["cache_hit_tokens_memory_total"]
    assert hits > 0.0, "nothing was ever reused"


@pytest.mark.deep
@pytest.mark.parametrize("state_bytes", [0, 160], ids=["plain", "checkpoints"])
def test_blocks_in_use_return_to_what_the_index_says(
    make_world: MakeWorld, state_bytes: int
) -> None:
    """After 1,000 random requests, a third of them aborted, nothing is referenced, open or lost.

    What ranks hold is what the index says, to the block; so is what it says of memory.
    """
    chance = random.Random(7)
    world = make_world(
        ranks=2,
        hardware=Hardware(kv_tokens=6_000, checkpoint_bytes=state_bytes),
        kv_row_growth_tokens=64,
        cache={"ssd": True},
    )
    world.read = trouble(chance, "unequal")
    clients = Clients(world, chance)
    for number in range(cases(100, 1_000)):
        clients.ask(f"r{number}")
        for _ in range(chance.randrange(4)):
            world.step()
        if chance.random() < 0.4:
            clients.abort(recent=4)
    world.settle()
    clients.check()
    assert len([end for end in world.ends.values() if _is_abort(end)]) > 250
    cache = world.core._batch.cache
    assert len(cache._state.pins) == 0
    assert len(cache._restorer._open) == 0
    assert not cache._spiller.is_busy
    assert not any(rank.rows or rank.open_restores for rank in world.ranks.values())
    world.compare_blocks()
    assert all(rank.resident_bytes <= 30_000 for rank in world.ranks.values())


def _is_abort(end: object) -> bool:
    return isinstance(end, RequestFinished) and end.finish_reason == "abort"
