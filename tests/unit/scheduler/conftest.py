"""Fixtures of the scheduler's tests."""

from collections.abc import Callable, Iterator

import pytest

from shared.config import check
from tests.unit.scheduler.harness import World


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """Build worlds; at teardown every accepted request has ended and the state agrees."""
    worlds: list[World] = []

    def make(
        *, ranks: int = 1, kv_tokens: int = 100_000, context: int = 8_192, **scheduler: object
    ) -> World:
        config = check({"world": {"size": ranks}, "scheduler": scheduler})
        world = World(config, kv_tokens, context)
        worlds.append(world)
        world.boot()
        return world

    yield make
    for world in worlds:
        world.core.check_invariants()
        assert world.accepted <= set(world.ends), "every accepted request ends"
