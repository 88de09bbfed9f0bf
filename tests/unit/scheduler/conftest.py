"""Fixtures of the scheduler's tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.unit.scheduler.in_memory_world import World
from tests.unit.scheduler.world_factory import worlds


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """Build worlds; at teardown every accepted request has ended and the state agrees."""
    with worlds() as make:
        yield make
