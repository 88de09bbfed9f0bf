"""Fixtures: the store's core on a temporary directory, and a rank connected to it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.cache_store.harness import NO_LIMIT, Rank, Store

MakeStore = Callable[..., Store]


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[MakeStore]:
    """Create stores on one directory; creating the next one closes the previous one as a kill
    does."""
    stores: list[Store] = []

    def make(bytes_max: int = NO_LIMIT, ttl_s: float = 0.0) -> Store:
        if stores:
            stores[-1].close()
        stores.append(Store(tmp_path / "blocks", bytes_max, ttl_s))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    """Return a store whose limit no test reaches."""
    return make_store()


@pytest.fixture
def rank(store: Store) -> Rank:
    """Return the only rank of its world, connected to the store."""
    return Rank(store)
