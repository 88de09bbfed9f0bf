"""The demo model, loaded once per worker with the fast BLAS."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.rank_worker.device import blas
from tests.support.cores import pinned_to_one_core

blas.preload()

from tests.demo_model.demo_answers import DemoModel  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def _pinned() -> Iterator[None]:
    with pinned_to_one_core():
        yield


@pytest.fixture(scope="session")
def folder() -> Path:
    """The folder of the checkpoint."""
    return ROOT / "models" / "demo"


@pytest.fixture(scope="session")
def demo(folder: Path) -> DemoModel:
    """The demo model as `mlx_lm.load` returns it."""
    return DemoModel.load(folder)
