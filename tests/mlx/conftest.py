"""Loads the fast BLAS before MLX, and offers tiny models with random weights."""

from collections.abc import Callable, Iterator

import pytest

from services.rank_worker.device import blas
from tests.cores import pinned_to_one_core

blas.preload()

from mlx import nn  # noqa: E402

from tests.mlx import models  # noqa: E402

QUICK_FAMILIES = {"qwen3", "deepseek_v3", "gemma3", "qwen3_next"}
"""Plain KV, latent attention with experts, sliding windows, recurrent state. `make proofs` tries
all families."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of all further families as proofs."""
    for item in items:
        call = getattr(item, "callspec", None)
        family = (
            call.params.get("family") if call and "tests/mlx/" in item.path.as_posix() else None
        )
        if isinstance(family, str) and family not in QUICK_FAMILIES:
            item.add_marker(pytest.mark.proof)


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with pinned_to_one_core():
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
