"""Random traffic through the real core, on ranks that lag, differ in speed, and are lost.

One seed is one run; a failure is replayed by its number.
"""

import random
from collections.abc import Callable, Iterator

import pytest

from services.scheduler.events import RankLost
from shared.messages import RequestFinished
from tests.unit.scheduler.harness import World, completion
from tests.unit.scheduler.reference_rank import COPIES
from tests.unit.scheduler.worlds import worlds

MakeWorld = Callable[..., World]


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    """Build worlds; at teardown every accepted request has ended and the state agrees."""
    with worlds() as make:
        yield make


@pytest.mark.parametrize("seed", range(150))
def test_random_traffic(make_world: MakeWorld, seed: int) -> None:
    """Random arrivals, lengths, stops, aborts, uneven ranks and lost ranks: all ends are right.

    With every other seed drafts are verified, and most texts repeat themselves.
    """
    chance = random.Random(seed)
    ranks = chance.choice([1, 2, 3])
    world = make_world(
        ranks=ranks,
        kv_tokens=chance.choice([1_200, 4_000, 50_000]),
        running_sequences_max=chance.choice([1, 3, 8, 16]),
        row_tokens_step=chance.choice([16, 64, 256]),
        step_tokens_max=chance.choice([32, 256, 2_048]),
        plans_in_flight=chance.choice([1, 2]),
        speculation={"method": "ngram", "tokens_max": 8} if seed % 2 else None,
    )
    wanted: dict[str, tuple[list[int], int, tuple[int, ...]]] = {}
    aborted = set()
    for step in range(150):
        if chance.random() < 0.3:
            start = [COPIES, chance.randrange(2, 12)] if seed % 2 and chance.random() < 0.7 else []
            prompt = [*start, *(chance.randrange(COPIES) for _ in range(chance.randrange(1, 390)))]
            length = chance.randrange(1, 60)
            stops = tuple(completion(prompt, length)[-3:-2]) if chance.random() < 0.3 else ()
            wanted[f"r{step}"] = prompt, length, stops
            world.submit(
                f"r{step}", prompt, length, stop_ids=list(stops), priority=chance.randrange(3)
            )
        if wanted and chance.random() < 0.1:
            name = chance.choice(list(wanted))
            aborted.add(name)
            world.abort(name)
        if chance.random() < 0.02:
            victim = chance.choice(list(world.ranks))
            world.ranks.pop(victim)
            world.tell(RankLost(victim, "killed"))
            for rank in range(ranks):
                world.start_rank(rank)
        for peer in chance.sample(list(world.ranks), len(world.ranks)):
            if chance.random() < 0.8:
                world.rank_step(peer)
        world.now_s += 0.01
    world.settle()
    for name, (prompt, length, stops) in wanted.items():
        expected = completion(prompt, length, stops)
        end = world.ends[name]
        assert isinstance(end, RequestFinished), end
        if end.finish_reason == "abort":
            assert name in aborted
            assert world.tokens[name] == expected[: len(world.tokens[name])]
        else:
            assert world.tokens[name] == expected
            assert end.finish_reason == ("stop" if expected[-1] in stops else "length")
