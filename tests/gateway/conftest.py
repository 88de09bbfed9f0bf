"""A gateway process in front of a scripted scheduler: a real Listener in a thread."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import FORGETFUL, RunningGateway


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and no weights."""
    return tiny_tokenizer.write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared_gateway(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway process that a whole module uses."""
    settings: dict[str, Any] = {"keepalive_s": 0.3}
    run_dir = tmp_path_factory.mktemp("run")
    with RunningGateway.start(model_folder, run_dir, prelude=FORGETFUL, **settings) as running:
        yield running


@pytest.fixture
def gateway(shared_gateway: RunningGateway) -> RunningGateway:
    """The module's gateway, with a scheduler that has forgotten the test before."""
    shared_gateway.scheduler.reset()
    return shared_gateway
