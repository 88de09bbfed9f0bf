"""Random requests on ranks of different speed that are lost at random; a failure is repeated by its
seed."""

import random

import msgspec
import pytest

from shared import limits
from shared.messages import RequestFinished, Speculation
from tests.simulation.checks.plan_limits import FORWARD_LIMITS, check_plan_sizes
from tests.support.effort import cases
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, RankSetup, completion
from tests.unit.scheduler.support.rank_failures import lose_rank, restart_ranks
from tests.unit.scheduler.support.reference_rank import REPEAT_MARKER
from tests.unit.scheduler.support.world_factory import MakeWorld

PlannedRequest = tuple[list[int], int, tuple[int, ...]]
"""Prompt, longest completion and stop ids of a request."""


FIRST_MODEL_SEED = 90
"""From this seed on, ranks propose drafts themselves."""


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(cases(12, 60)))
def test_requests_get_their_own_tokens_under_random_traffic_and_lost_ranks(
    make_world: MakeWorld, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random arrivals, lengths, stops, aborts and lost ranks: every request gets its own tokens.

    One, two or three tenants with changing weights take turns.

    Every other seed verifies n-gram drafts of texts that repeat themselves; the last seeds use
    draft models, requests with different draft methods, and prompts with common prefixes.
    """
    monkeypatch.setattr(limits, "FORWARD_TOKENS_MAX", FORWARD_LIMITS[seed % 3])
    rng = random.Random(seed)
    world, methods = _make_world(make_world, rng, seed)
    tenants = random.Random(f"{seed} tenants")
    requests: dict[str, PlannedRequest] = {}
    aborted = set()
    for step in range(150):
        if rng.random() < 0.3:
            name = f"r{step}"
            requests[name] = _draw_request(rng, seed, list(requests.values()))
            prompt, length, stops = requests[name]
            speculation_request = msgspec.convert({"method": rng.choice(methods)}, Speculation)
            world.submit(
                name,
                prompt,
                length,
                stop_ids=list(stops),
                priority=rng.randrange(3),
                tenant=tenants.choice(["a", "b", "c"][: 1 + seed % 3]),
                weight=tenants.choice([0.5, 1.0, 2.0]),
                speculation=speculation_request,
            )
        if requests and rng.random() < 0.1:
            name = rng.choice(list(requests))
            aborted.add(name)
            world.abort(name)
        if rng.random() < 0.02:
            lose_rank(world, rng.choice(list(world.ranks)))
            restart_ranks(world)
        for peer in rng.sample(list(world.ranks), len(world.ranks)):
            if rng.random() < 0.8:
                world.rank_step(peer)
        world.now_s += 0.01
    world.settle()
    check_plan_sizes(world.plans, world.config.scheduler.step_tokens_max)
    for name, (prompt, length, stops) in requests.items():
        _check_end(
            world, name, completion(prompt, length, stops), stops, is_aborted=name in aborted
        )


def _make_world(
    make_world: MakeWorld, rng: random.Random, seed: int
) -> tuple[InMemoryWorld, list[str]]:
    """Return a world and the draft methods that requests ask for."""
    ranks = rng.choice([1, 2, 3])
    speculation: dict[str, object] | None = {"method": "ngram", "tokens_max": 8} if seed % 2 else {}
    methods = ["default"]
    if seed >= FIRST_MODEL_SEED:
        method = rng.choice(["draft_model", "draft_model", "eagle"])
        speculation = {"method": method, "draft_model": "small", "tokens_max": 5}
        methods = ["default", "default", "ngram", "off"]
    world = make_world(
        ranks=ranks,
        hardware=RankSetup(
            kv_tokens=rng.choice([1_300, 4_000, 50_000]),
            draft_quality=rng.choice([0.1, 0.6, 0.9]),
        ),
        running_sequences_max=rng.choice([1, 3, 8, 16]),
        kv_row_growth_tokens=rng.choice([16, 64, 256]),
        step_tokens_max=rng.choice([32, 256, 2_048]),
        plans_in_flight=rng.choice([1, 2]),
        speculation=speculation,
    )
    return world, methods


def _draw_request(rng: random.Random, seed: int, before: list[PlannedRequest]) -> PlannedRequest:
    """Return a prompt, a length and stop ids; some prompts share a prefix, some texts repeat
    themselves."""
    start: list[int] = []
    if seed >= FIRST_MODEL_SEED and before and rng.random() < 0.3:
        start = rng.choice(before)[0][:480]
    elif seed % 2 and rng.random() < 0.7:
        start = [REPEAT_MARKER, rng.randrange(2, 12)]
    count = rng.randrange(1, 20 if len(start) > 2 else 390)
    prompt = [*start, *(rng.randrange(REPEAT_MARKER) for _ in range(count))]
    length = rng.randrange(1, 60)
    stops = tuple(completion(prompt, length)[-3:-2]) if rng.random() < 0.3 else ()
    return prompt, length, stops


def _check_end(
    world: InMemoryWorld,
    name: str,
    expected: list[int],
    stops: tuple[int, ...],
    *,
    is_aborted: bool,
) -> None:
    end = world.ends[name]
    assert isinstance(end, RequestFinished), end
    if end.finish_reason == "abort":
        assert is_aborted
        assert world.tokens[name] == expected[: len(world.tokens[name])]
    else:
        assert world.tokens[name] == expected
        assert end.finish_reason == ("stop" if expected[-1] in stops else "length")
