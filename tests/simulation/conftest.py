"""Fixtures of the simulation's tests."""

from collections.abc import Iterator

import pytest

from tests.unit.scheduler.support.world_factory import MakeWorld, world_factory


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    """Build worlds; at teardown check their state and that accepted requests have ended."""
    with world_factory() as make:
        yield make
