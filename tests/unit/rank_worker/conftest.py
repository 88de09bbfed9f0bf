"""The scripted store that the tests of the stored tier talk to, and a rank with stored blocks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.rank_worker.stored.scripted_store import ScriptedStore
from tests.unit.rank_worker.stored.stored_rank import Rank, close_all


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ScriptedStore]:
    """A store on a real socket; every tier that a test has made ends with it."""
    made = ScriptedStore(tmp_path)
    made.start()
    yield made
    close_all()
    made.close()


@pytest.fixture
def rank(store: ScriptedStore) -> Rank:
    """A tier whose blocks 0 to 7 are stored."""
    made = Rank(store.address)
    made.store(range(8))
    return made
