"""A store's core on a directory of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.cache_store.harness import NO_LIMIT, Rank, Store

MakeStore = Callable[..., Store]


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[MakeStore]:
    """Make a store on the same directory; the one before it ends as a killed process does."""
    made: list[Store] = []

    def make(bytes_max: int = NO_LIMIT) -> Store:
        if made:
            made[-1].close()
        made.append(Store(tmp_path / "blocks", bytes_max))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    """A store without a limit that matters."""
    return make_store()


@pytest.fixture
def rank(store: Store) -> Rank:
    """The only rank of its world."""
    return Rank(store)
