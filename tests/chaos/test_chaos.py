"""Faults of a real Lockstep under sixteen streams: a short form of `python -m tests.chaos`.

Each fault is injected once with two ranks, or as often as LOCKSTEP_TEST_FAULTS says.
"""

import os
from collections.abc import Iterator

import pytest

from tests.chaos.campaign import Campaign, CampaignOptions
from tests.chaos.cluster.stack import Stack, StackOptions
from tests.chaos.cluster.stack_kinds import StackKind, open_stack
from tests.chaos.faults import catalog
from tests.chaos.load.client_load import Load
from tests.chaos.results import FaultResult, render

pytestmark = pytest.mark.alone
COUNT = int(os.environ.get("LOCKSTEP_TEST_FAULTS", "1"))
SLACK_S = 5.0
"""Seconds that a process may be delayed by other work of the machine."""
SUPERVISED_FAULTS = (
    "rank-kill-decode", "rank-kill-prefill", "rank-kill-recovery", "rank-kill-load", "rank-stop",
    "rank-stop-1s", "scheduler-kill", "scheduler-stop-1s", "store-kill", "gateway-kill",
    "listeners", "supervisor-kill",
)  # fmt: skip


class LoadedStack:
    """A stack under load, shared by several tests."""

    def __init__(self, campaign: Campaign, stack: Stack) -> None:
        self._campaign = campaign
        self._stack = stack
        self._load = Load(stack.port, campaign.tasks, campaign.options.streams, 1)
        campaign.learn_expected(self._load)
        self.inject("none")

    def inject(self, name: str, count: int = COUNT) -> FaultResult:
        """Inject a fault; fail the test if a token is lost, duplicated, late or different."""
        row = self._campaign.run_fault(self._stack, self._load, catalog.ALL[name], count)
        assert row.is_good, f"\n{render([row])}"
        return row

    def close(self) -> None:
        """Stop the clients."""
        self._load.close()


@pytest.fixture(scope="module")
def campaign() -> Campaign:
    """Return a campaign, which records the texts without faults once."""
    return Campaign(CampaignOptions(task_count=16, answer_tokens=160, slack_s=SLACK_S))


def _open_loaded_stack(campaign: Campaign, kind: StackKind) -> Iterator[LoadedStack]:
    with open_stack(kind, StackOptions(campaign.options.ranks)) as stack:
        made = LoadedStack(campaign, stack)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def supervised(campaign: Campaign) -> Iterator[LoadedStack]:
    """Start one `lockstep up` under load."""
    yield from _open_loaded_stack(campaign, "supervised")


@pytest.fixture(scope="module")
def fault_injection(campaign: Campaign) -> Iterator[LoadedStack]:
    """Start roles one by one, with proxies and ranks that can return wrong results."""
    yield from _open_loaded_stack(campaign, "fault injection")


@pytest.mark.parametrize("name", SUPERVISED_FAULTS)
def test_killed_or_stopped_process_pauses_streams_and_changes_no_text(
    supervised: LoadedStack, name: str
) -> None:
    """A process that dies or stops pauses streams; texts are the same as without the fault."""
    row = supervised.inject(name)

    assert row.streams >= 16


def test_streams_continue_without_pause_while_cache_disk_is_full(supervised: LoadedStack) -> None:
    """Streams continue without a pause while the cache store's disk is full."""
    supervised.inject("disk-full")


@pytest.mark.parametrize("name", ["rank-link-cut", "gateway-link-cut", "rank-link-delay"])
def test_cut_or_slow_link_pauses_streams_and_changes_no_text(
    fault_injection: LoadedStack, name: str
) -> None:
    """A link that is cut or slow pauses streams at most."""
    fault_injection.inject(name)


def test_wrong_result_of_rank_ends_epoch_and_reaches_no_stream(
    fault_injection: LoadedStack,
) -> None:
    """A wrong result ends the epoch, and no token of its step reaches a stream."""
    fault_injection.inject("wrong-row")
    fault_injection.inject("wrong-token")
