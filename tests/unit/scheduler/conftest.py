"""Fixtures of the scheduler's tests."""

from collections.abc import Iterator

import pytest

from tests.unit.scheduler.world_factory import MakeWorld, world_factory


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    """Build worlds; at teardown every accepted request has ended and the state agrees."""
    with world_factory() as make:
        yield make
