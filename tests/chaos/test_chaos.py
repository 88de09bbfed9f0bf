"""Faults done to a real Lockstep under sixteen streams: the short form of `python -m tests.chaos`.

Every kind of fault once, two ranks. LOCKSTEP_TEST_FAULTS says how often instead.
"""

import os
from collections.abc import Iterator

import pytest

from tests.chaos import catalog, grounds
from tests.chaos.campaign import Campaign, Options
from tests.chaos.fault import Ground as Kind
from tests.chaos.load import Load
from tests.chaos.stack import Shape, Stack
from tests.chaos.table import Row, render

pytestmark = pytest.mark.alone
COUNT = int(os.environ.get("LOCKSTEP_TEST_FAULTS", "1"))
SLACK_S = 5.0
"""Machines that run tests hold a process up for seconds."""
ON_UP = (
    "rank-kill-decode", "rank-kill-prefill", "rank-kill-recovery", "rank-kill-load", "rank-stop",
    "rank-stop-1s", "scheduler-kill", "scheduler-stop-1s", "store-kill", "gateway-kill",
    "listeners", "supervisor-kill",
)  # fmt: skip


class Ground:
    """One stack and its load, for several tests."""

    def __init__(self, campaign: Campaign, stack: Stack) -> None:
        self._campaign = campaign
        self._stack = stack
        self._load = Load(stack.port, campaign.tasks, campaign.options.streams, 1)
        campaign.learn(self._load)
        self.do("none")

    def do(self, name: str, count: int = COUNT) -> Row:
        """Do a fault; it fails the test when anything was lost, doubled, late or different."""
        row = self._campaign.do(self._stack, self._load, catalog.ALL[name], count)
        assert row.is_good, f"\n{render([row])}"
        return row

    def close(self) -> None:
        """End the clients."""
        self._load.close()


@pytest.fixture(scope="module")
def campaign() -> Campaign:
    """The texts without faults are asked for once."""
    return Campaign(Options(task_count=16, answer_tokens=160, slack_s=SLACK_S))


def _ground(campaign: Campaign, kind: Kind) -> Iterator[Ground]:
    with grounds.opened(kind, Shape(campaign.options.ranks)) as stack:
        made = Ground(campaign, stack)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def up(campaign: Campaign) -> Iterator[Ground]:
    """One `lockstep up`."""
    yield from _ground(campaign, "up")


@pytest.fixture(scope="module")
def by_parts(campaign: Campaign) -> Iterator[Ground]:
    """Roles started one by one, with proxies between them and ranks that can lie."""
    yield from _ground(campaign, "by parts")


@pytest.mark.parametrize("name", ON_UP)
def test_no_stream_is_lost(up: Ground, name: str) -> None:
    """What dies or stops costs a pause: no stream, no token, no other text than without it."""
    row = up.do(name)

    assert row.streams >= 16


def test_a_full_disk_is_not_noticed(up: Ground) -> None:
    """Streams go on at their pace while the cache store's disk is full."""
    up.do("disk-full")


@pytest.mark.parametrize("name", ["rank-link-cut", "gateway-link-cut", "rank-link-delay"])
def test_links_fail(by_parts: Ground, name: str) -> None:
    """A connection that is cut, or slow, costs a pause at most."""
    by_parts.do(name)


def test_no_lie_leaves(by_parts: Ground) -> None:
    """A rank that computes otherwise ends the epoch; its step's tokens reach nobody."""
    by_parts.do("lie-row")
    by_parts.do("lie-token")
