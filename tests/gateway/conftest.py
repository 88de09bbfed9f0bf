"""Fixtures: a gateway process in front of a scripted scheduler."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import FORGET_FULL_QUEUE, RunningGateway


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and no weights."""
    return tiny_tokenizer.write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def shared_gateway(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway process for all tests that need no settings of their own."""
    settings: dict[str, Any] = {"keepalive_s": 0.3}
    run_dir = tmp_path_factory.mktemp("run")
    started = RunningGateway.start(model_folder, run_dir, prelude=FORGET_FULL_QUEUE, **settings)
    with started as running:
        yield running


@pytest.fixture
def gateway(shared_gateway: RunningGateway) -> RunningGateway:
    """The shared gateway, with the scheduler's script and records reset."""
    shared_gateway.scheduler.reset()
    return shared_gateway
