"""Hosts with keys, and the scheduler's listener."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.messages import ToScheduler
from shared.transport.links import Listener
from tests.unit.shared.transport.authentication.keyed_hosts import Hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Four hosts with keys."""
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.close()


@pytest.fixture
def listener(hosts: Hosts) -> Listener[ToScheduler]:
    """The scheduler's listener for gateways."""
    return hosts.listen()
