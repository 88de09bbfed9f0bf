"""Loads the fast BLAS before MLX, and offers tiny models with random weights."""

from collections.abc import Callable, Iterator

import pytest

from services.rank_worker.device import blas
from tests.cores import one_core

blas.preload()

from mlx import nn  # noqa: E402

from tests.mlx import models  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


@pytest.fixture(scope="session")
def make_model() -> Callable[[str], nn.Module]:
    """Return what makes the tiny model of a family; each is made once."""
    made: dict[str, nn.Module] = {}

    def make(family: str) -> nn.Module:
        if family not in made:
            made[family] = models.MAKERS[family]()
        return made[family]

    return make
