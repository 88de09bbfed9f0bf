"""Fixtures: a scripted cache store, and a rank's stored tier connected to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.rank_worker.stored.scripted_store import ScriptedStore
from tests.unit.rank_worker.stored.stored_rank import Rank, scripted_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ScriptedStore]:
    """Start a scripted store; all tiers of the test are closed before it."""
    with scripted_store(tmp_path) as store:
        yield store


@pytest.fixture
def rank(store: ScriptedStore) -> Rank:
    """Return a rank whose blocks 0 to 7 are stored."""
    made = Rank(store.address)
    made.store(range(8))
    return made
