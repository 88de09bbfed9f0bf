"""Random traffic through the real core, on ranks that lag, differ in speed, and are lost.

One seed is one run; a failure is replayed by its number.
"""

import random
from collections.abc import Callable, Iterator

import msgspec
import pytest

from services.scheduler.events import RankLost
from shared import limits
from shared.messages import RequestFinished, Speculation
from tests.effort import cases
from tests.simulation.checks.plan_limits import FORWARDS, check_sizes
from tests.unit.scheduler.in_memory_world import Hardware, World, completion
from tests.unit.scheduler.reference_rank import COPIES
from tests.unit.scheduler.world_factory import worlds

MakeWorld = Callable[..., World]
Wanted = tuple[list[int], int, tuple[int, ...]]
"""A prompt, the longest completion, and ids that end it."""


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    """Build worlds; at teardown every accepted request has ended and the state agrees."""
    with worlds() as make:
        yield make


WITH_MODELS = 90
"""From this seed on ranks propose drafts themselves."""


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(cases(12, 120)))
def test_random_traffic(make_world: MakeWorld, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random arrivals, lengths, stops, aborts, uneven ranks and lost ranks: all ends are right.

    With every other seed drafts are verified, and most texts repeat themselves; with the last ones
    requests ask for different drafts, and prompts begin as others.
    """
    monkeypatch.setattr(limits, "FORWARD_TOKENS_MAX", FORWARDS[seed % 3])
    chance = random.Random(seed)
    world, wishes = _make(make_world, chance, seed)
    wanted: dict[str, Wanted] = {}
    aborted = set()
    for step in range(150):
        if chance.random() < 0.3:
            name = f"r{step}"
            wanted[name] = _draw(chance, seed, list(wanted.values()))
            prompt, length, stops = wanted[name]
            wish = msgspec.convert({"method": chance.choice(wishes)}, Speculation)
            world.submit(
                name,
                prompt,
                length,
                stop_ids=list(stops),
                priority=chance.randrange(3),
                speculation=wish,
            )
        if wanted and chance.random() < 0.1:
            name = chance.choice(list(wanted))
            aborted.add(name)
            world.abort(name)
        if chance.random() < 0.02:
            victim = chance.choice(list(world.ranks))
            world.ranks.pop(victim)
            world.tell(RankLost(victim, "killed"))
            for rank in range(world.config.world.size):
                world.start_rank(rank)
        for peer in chance.sample(list(world.ranks), len(world.ranks)):
            if chance.random() < 0.8:
                world.rank_step(peer)
        world.now_s += 0.01
    world.settle()
    check_sizes(world.plans, world.config.scheduler.step_tokens_max)
    for name, (prompt, length, stops) in wanted.items():
        _check_end(
            world, name, completion(prompt, length, stops), stops, is_aborted=name in aborted
        )


def _make(make_world: MakeWorld, chance: random.Random, seed: int) -> tuple[World, list[str]]:
    """Return a world, and which drafts requests ask for."""
    ranks = chance.choice([1, 2, 3])
    speculation: dict[str, object] | None = {"method": "ngram", "tokens_max": 8} if seed % 2 else {}
    wishes = ["default"]
    if seed >= WITH_MODELS:
        method = chance.choice(["draft_model", "draft_model", "eagle"])
        speculation = {"method": method, "draft_model": "small", "tokens_max": 5}
        wishes = ["default", "default", "ngram", "off"]
    world = make_world(
        ranks=ranks,
        hardware=Hardware(
            kv_tokens=chance.choice([1_300, 4_000, 50_000]),
            draft_quality=chance.choice([0.1, 0.6, 0.9]),
        ),
        running_sequences_max=chance.choice([1, 3, 8, 16]),
        kv_row_growth_tokens=chance.choice([16, 64, 256]),
        step_tokens_max=chance.choice([32, 256, 2_048]),
        plans_in_flight=chance.choice([1, 2]),
        speculation=speculation,
    )
    return world, wishes


def _draw(chance: random.Random, seed: int, before: list[Wanted]) -> Wanted:
    """Return a prompt, a length and stop ids; some prompts begin as others, some repeat."""
    start: list[int] = []
    if seed >= WITH_MODELS and before and chance.random() < 0.3:
        start = chance.choice(before)[0][:480]
    elif seed % 2 and chance.random() < 0.7:
        start = [COPIES, chance.randrange(2, 12)]
    count = chance.randrange(1, 20 if len(start) > 2 else 390)
    prompt = [*start, *(chance.randrange(COPIES) for _ in range(count))]
    length = chance.randrange(1, 60)
    stops = tuple(completion(prompt, length)[-3:-2]) if chance.random() < 0.3 else ()
    return prompt, length, stops


def _check_end(
    world: World, name: str, expected: list[int], stops: tuple[int, ...], *, is_aborted: bool
) -> None:
    end = world.ends[name]
    assert isinstance(end, RequestFinished), end
    if end.finish_reason == "abort":
        assert is_aborted
        assert world.tokens[name] == expected[: len(world.tokens[name])]
    else:
        assert world.tokens[name] == expected
        assert end.finish_reason == ("stop" if expected[-1] in stops else "length")
