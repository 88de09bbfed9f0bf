"""Requests to a world with a prefix cache, and readings of its cache metrics."""

from typing import Any

from services.scheduler.events import TimePassed
from shared.messages import StepPlan
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, RankSetup, completion
from tests.unit.scheduler.support.reference_rank import Block
from tests.unit.scheduler.support.world_factory import MakeWorld

Disks = dict[int, dict[bytes, Block]]
SSD = {"ssd": True}
PROMPT = [3 * number % 1_000 for number in range(100)]
"""A prompt of six whole blocks of 16 tokens and four tokens more."""


def run_request(
    world: InMemoryWorld, name: str, prompt: list[int], tokens: int = 5, **options: Any
) -> int:
    """Run one request alone; return the number of reused prompt tokens."""
    world.submit(name, prompt, tokens, **options)
    world.settle()
    assert world.tokens[name] == completion(prompt, tokens)
    return world.cached[name].memory_tokens + world.cached[name].stored_tokens


def prefilled_tokens(plans: list[StepPlan]) -> int:
    """Return how many prompt tokens the plans compute."""
    return sum(chunk.length for plan in plans for chunk in plan.prefill_chunks)


def read_metrics(world: InMemoryWorld) -> dict[str, float]:
    """Return the scheduler's counters and gauges."""
    world.now_s += 2.0
    world.tell(TimePassed())
    assert world.status is not None
    return {**world.status.counters, **world.status.gauges}


def restart_world(
    make_world: MakeWorld, disks: Disks, *, ranks: int = 1, **options: object
) -> InMemoryWorld:
    """Start a world with new processes and the given disks."""
    hardware = RankSetup(disks=disks, **options)  # type: ignore[arg-type]
    return make_world(ranks=ranks, hardware=hardware, cache=SSD)


def fill_disks(make_world: MakeWorld, *, ranks: int = 1, **options: object) -> Disks:
    """Return disks that store PROMPT and 20 tokens of its completion."""
    disks: Disks = {}
    world = restart_world(make_world, disks, ranks=ranks, **options)
    run_request(world, "before", PROMPT, 20)
    assert len(disks) == ranks
    assert all(disks.values())
    return disks
