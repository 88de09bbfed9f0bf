"""Fixtures of the scheduler's tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.unit.scheduler.harness import World
from tests.unit.scheduler.world.worlds import worlds


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """Build worlds; at teardown every accepted request has ended and the state agrees."""
    with worlds() as make:
        yield make
