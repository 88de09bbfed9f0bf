"""Consequences of failed epochs: the end of all starts, or less memory."""

from typing import Literal

import msgspec
import pytest

from services.rank_worker.peers.failure import failure_cause
from services.scheduler.core import SchedulerCore
from services.scheduler.events import RankLost, RankMessageReceived, TimePassed
from shared.configuration.loading import config_from_tree
from shared.errors import RanksUnreachable, UnavailableError
from shared.identifiers import PeerId
from shared.messages import JoinWorld, RankFailed, RequestFailed, RequestRejected
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, completion
from tests.unit.scheduler.support.rank_failures import (
    fail_rank,
    lose_rank,
    query_status,
    restart_ranks,
)
from tests.unit.scheduler.support.rank_messages import READY, rank_hello
from tests.unit.scheduler.support.world_factory import MakeWorld


def failure_of(world: InMemoryWorld, name: str) -> RequestFailed:
    """Return the failure of a request; fail on any other end."""
    end = world.ends[name]
    assert isinstance(end, RequestFailed), end
    return end


def test_fifth_failed_epoch_within_ten_minutes_fails_all_requests(make_world: MakeWorld) -> None:
    """Four failed epochs are pauses; the fifth within ten minutes fails all requests."""
    world = make_world(ranks=2, epochs_failed_max=5, running_sequences_max=1)
    for name in "abcd":
        world.submit(name, [1, 2, 3], 50)
    for name in "abcd":
        lose_rank(world)
        world.now_s += 20.0
        world.abort(name)
        restart_ranks(world)
        assert query_status(world).ready
    world.submit("e", [4], 50)
    world.submit("f", [4], 50)
    lose_rank(world)
    for name in "ef":
        end = failure_of(world, name)
        assert end.cause == "failed"
        assert end.detail.startswith("5 epochs have failed within 80 s")
        assert end.detail.endswith("Rank 0 is lost (silent for 10 s).")
    status = query_status(world)
    assert (status.ready, status.failure, status.reason) == (False, "epochs", end.detail)
    world.submit("g", [1], 1)
    refused = world.ends["g"]
    assert isinstance(refused, RequestRejected)
    assert (refused.cause, refused.detail, refused.retry_after_s) == ("not_ready", end.detail, None)


def test_new_ranks_get_no_join_order_after_world_failed(make_world: MakeWorld) -> None:
    """After too many failed epochs new rank processes stay connected and get no order."""
    world = make_world(epochs_failed_max=1)
    world.submit("a", [1, 2, 3], 50)
    lose_rank(world)
    restart_ranks(world)
    restart_ranks(world)
    assert not world.ranks
    world.advance(700.0)
    assert not world.ranks
    assert query_status(world).failure == "epochs"
    assert "1 epoch has failed" in query_status(world).reason


def test_failed_epochs_outside_time_window_do_not_fail_world(make_world: MakeWorld) -> None:
    """Only epochs that failed within the window count."""
    world = make_world(epochs_failed_max=2, epochs_failed_window_s=100.0)
    for number in range(5):
        world.submit(f"a{number}", [1, 2, 3], 50)
        lose_rank(world)
        restart_ranks(world)
        world.now_s += 101.0
    assert query_status(world).ready
    world.submit("b", [1, 2, 3], 50)
    lose_rank(world)
    restart_ranks(world)
    world.submit("c", [1, 2, 3], 50)
    lose_rank(world)
    assert query_status(world).failure == "epochs"


def test_hundred_lost_epochs_that_gave_tokens_do_not_fail_world(make_world: MakeWorld) -> None:
    """A hundred kills lose nothing, because each epoch generates a token."""
    world = make_world()
    world.submit("a", [1, 2, 3], 150)
    for _ in range(100):
        world.step()
        lose_rank(world)
        restart_ranks(world)
    world.settle()
    assert world.tokens["a"] == completion([1, 2, 3], 150)


def test_lost_epochs_without_requests_do_not_fail_world(make_world: MakeWorld) -> None:
    """Epochs that had no request do not count as failed."""
    world = make_world(epochs_failed_max=2)
    for _ in range(10):
        lose_rank(world)
        restart_ranks(world)
    assert query_status(world).ready


def test_request_without_token_in_two_failed_epochs_fails_and_others_continue(
    make_world: MakeWorld,
) -> None:
    """One epoch before the limit, requests that got no token in any failed epoch are failed."""
    world = make_world(epochs_failed_max=3)
    world.submit("poison", [1, 2, 3], 50)
    lose_rank(world)
    world.submit("b", [4, 5], 10)
    restart_ranks(world)
    lose_rank(world)
    assert failure_of(world, "poison").detail.startswith("2 epochs in a row have failed while")
    restart_ranks(world)
    world.settle()
    assert world.tokens["b"] == completion([4, 5], 10)
    assert query_status(world).ready


def test_epochs_ended_by_unavailable_hub_do_not_fail_world(make_world: MakeWorld) -> None:
    """Failures with cause `unavailable`, as before the network is up, do not count."""
    world = make_world(epochs_failed_max=2)
    for number in range(10):
        world.submit(f"a{number}", [1, 2, 3], 50)
        fail_rank(world, next(iter(world.ranks)), "The hub does not answer.", cause="unavailable")
        world.abort(f"a{number}")
        restart_ranks(world)
    assert query_status(world).ready


def test_repeated_failures_while_loading_fail_world() -> None:
    """Ranks that always fail while loading are not started forever."""
    core = SchedulerCore(config_from_tree({"world": {"size": 1}}))
    orders = 0
    for number in range(9):
        peer = PeerId(f"rank-{number}".encode())
        for message in (
            rank_hello(0, number),
            RankFailed(rank=0, epoch=1, detail="x", permanent=False),
        ):
            actions = core.handle(RankMessageReceived(peer, message), 1.0 + number)
            orders += sum(isinstance(getattr(one, "message", None), JoinWorld) for one in actions)
    assert orders == 5
    assert core._world.recovery.failure == "epochs"


class WorldStarts:
    """Starts of two ranks that fail while they join."""

    def __init__(self, **scheduler: object) -> None:
        self.core = SchedulerCore(config_from_tree({"world": {"size": 2}, "scheduler": scheduler}))
        self.count = 0

    @property
    def failure(self) -> str:
        """Why no further start is tried; "" while starts continue."""
        return self.core._world.recovery.failure

    def start(self) -> list[PeerId]:
        """Start two processes."""
        self.count += 1
        peers = [PeerId(f"rank-{self.count}-{rank}".encode()) for rank in range(2)]
        for rank, peer in enumerate(peers):
            self.core.handle(
                RankMessageReceived(peer, rank_hello(rank, 2 * self.count + rank)),
                float(self.count),
            )
        return peers

    def report(
        self,
        peer: PeerId,
        rank: int,
        detail: str,
        cause: Literal["error", "peer"] = "error",
        *,
        permanent: bool = False,
    ) -> None:
        """Let a process of the last start report that it has failed."""
        failed = RankFailed(
            rank=rank, epoch=self.count, detail=detail, permanent=permanent, cause=cause
        )
        self.core.handle(RankMessageReceived(peer, failed), float(self.count))

    def fail(self, *causes: Literal["error", "unavailable"]) -> None:
        """Let ranks 0 and 1 of another start fail with these causes, in this order."""
        for rank, (peer, cause) in enumerate(zip(self.start(), causes, strict=False)):
            failed = RankFailed(
                rank=rank, epoch=self.count, detail=f"{cause}.", permanent=False, cause=cause
            )
            self.core.handle(RankMessageReceived(peer, failed), float(self.count))


def test_epochs_ended_by_unreachable_ranks_do_not_fail_world() -> None:
    """A switch may come up long after the machines: starts continue, and the status names the
    reason."""
    assert failure_cause(RanksUnreachable("Rank 0 cannot reach rank 1.")) == "unavailable"
    starts = WorldStarts(epochs_failed_max=2)
    for _ in range(9):
        starts.fail("unavailable", "unavailable")
        assert starts.core._world.explain() == (
            "0 of 2 ranks are connected. The last epoch has failed: Rank 0 failed: unavailable."
        )
    peers = starts.start()
    assert "(0 %). The last epoch has failed: Rank 0 failed" in starts.core._world.explain()
    for rank, peer in enumerate(peers):
        starts.core.handle(
            RankMessageReceived(peer, msgspec.structs.replace(READY, rank=rank)), 20.0
        )
    assert starts.core._world.explain() == ""
    starts.core.handle(RankLost(peers[0], "goodbye"), 21.0)
    assert starts.core._world.explain() == "0 of 2 ranks are connected."


def test_epoch_with_later_cause_unavailable_does_not_count_as_failed() -> None:
    """When another rank's collective fails first, a later cause `unavailable` still excuses that
    epoch."""
    starts = WorldStarts(epochs_failed_max=2)
    starts.fail("error", "unavailable")
    assert "Rank 1 failed: unavailable." in starts.core._world.explain()
    starts.fail("unavailable", "unavailable")
    starts.fail("error", "error")
    assert starts.failure == ""
    starts.fail("error", "error")
    assert starts.failure == "epochs"


@pytest.mark.parametrize("symptom", ["peer", "silence", "deadline"])
def test_own_cause_of_late_rank_replaces_symptom_after_all_starts_have_ended(symptom: str) -> None:
    """The rank that knows the cause may report after the symptom of another has ended all trying:
    the sentence names the cause that is known when it is read."""
    starts = WorldStarts(epochs_failed_max=1)
    first, second = starts.start()
    if symptom == "peer":
        starts.report(first, 0, "A peer ended while joining.", "peer")
    elif symptom == "silence":
        starts.core.handle(RankLost(first, "silent for 10 s"), 2.0)
    else:
        for now_s in range(2, 100):
            starts.core.handle(TimePassed(), float(now_s))
    assert starts.failure == "epochs"
    assert "rdma_en9" not in starts.core._world.explain()
    starts.report(second, 1, "Could not find device rdma_en9.")

    assert starts.core._world.explain().endswith(
        "The last one: Rank 1 failed: Could not find device rdma_en9."
    )
    starts.report(second, 1, "A peer ended while joining.", "peer")
    assert "rdma_en9" in starts.core._world.explain()


def test_first_own_cause_stays_when_other_ranks_report_later() -> None:
    """A symptom, or another cause, does not replace the first rank's own cause."""
    starts = WorldStarts(epochs_failed_max=9)
    first, second = starts.start()
    starts.report(second, 1, "Could not find device rdma_en9.")
    starts.report(first, 0, "A peer ended while joining.", "peer")
    starts.report(first, 0, "Something else.")

    assert "Rank 1 failed: Could not find device rdma_en9." in starts.core._world.explain()


def test_late_wrong_configuration_is_reason_for_failed_epochs() -> None:
    """A wrong setting that one rank reports late is why no further start is tried."""
    starts = WorldStarts(epochs_failed_max=1)
    first, second = starts.start()
    starts.report(first, 0, "A peer ended while joining.", "peer")
    starts.report(second, 1, "No such model.", permanent=True)

    assert (starts.failure, starts.core._world.explain()) == ("configuration", "No such model.")


def test_failed_epoch_after_unavailable_one_counts_as_failed() -> None:
    """The cause of one epoch does not excuse the next one."""
    starts = WorldStarts(epochs_failed_max=1)
    starts.fail("unavailable", "unavailable")
    starts.core.handle(RankLost(starts.start()[0], "goodbye"), 5.0)
    assert starts.failure == "epochs"


@pytest.mark.parametrize("is_first", [True, False])
def test_permanent_rank_failure_after_peer_crash_is_configuration_failure(
    make_world: MakeWorld, is_first: bool
) -> None:
    """A permanent failure counts even when its peer's crash is reported first."""
    world = make_world(ranks=2)
    world.submit("a", [1, 2], 3)
    first, second = world.ranks
    for peer in (first, second) if is_first else (second, first):
        is_permanent = peer == first
        detail = "No such model." if is_permanent else "A collective failed."
        fail_rank(world, peer, detail, permanent=is_permanent)
    assert failure_of(world, "a").detail == "No such model."
    assert (query_status(world).failure, query_status(world).reason) == (
        "configuration",
        "No such model.",
    )


def test_failure_report_of_unknown_peer_does_not_end_world(make_world: MakeWorld) -> None:
    """A peer outside the world cannot end it."""
    world = make_world()
    for permanent in (True, False):
        message = RankFailed(rank=0, epoch=1, detail="x", permanent=permanent)
        world.tell(RankMessageReceived(PeerId(b"rank-ghost"), message))
    assert query_status(world).ready
    assert [one.event for one in world.log_lines].count("message_refused") == 2


def test_status_names_block_size_setting_when_above_context_length(make_world: MakeWorld) -> None:
    """No epoch can begin with blocks above the context; the status names the setting and its
    values."""
    world = make_world(context=40, cache={"block_tokens": 64})
    status = query_status(world)
    assert status.failure == "configuration"
    assert "set it to 16 up to 40" in status.reason


def test_long_failure_detail_reaches_client_cut_to_message_limit(make_world: MakeWorld) -> None:
    """A failure detail of any allowed length reaches the client, cut to the message limit."""
    world = make_world(epochs_failed_max=1)
    world.submit("a", [1], 2)
    fail_rank(world, next(iter(world.ranks)), "x" * 4_096)
    assert len(failure_of(world, "a").detail) <= 4_096
    assert len(query_status(world).reason) <= 4_096


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "[metal::malloc] Attempting to allocate 20 bytes which is greater than the maximum.",
        "[malloc_or_wait] Unable to allocate 24 bytes.",
        "[malloc] Unable to allocate 4096 bytes.",
        "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "cudaGraphLaunch(graph, stream) failed: cudaErrorMemoryAllocation: out of memory.",
    ],
)
def test_mlx_errors_for_lack_of_memory_get_cause_memory(text: str) -> None:
    """MLX's messages for lack of memory get the cause `memory`."""
    assert failure_cause(RuntimeError(text)) == "memory"
    assert failure_cause(MemoryError()) == "memory"


def test_unreachable_hub_gets_cause_unavailable_and_other_failures_cause_error() -> None:
    """A service that does not answer gets the cause `unavailable`, and other failures the cause
    `error`.
    """
    for text in ("[ring] Send of 4096 bytes failed.", "Slice sizes differ."):
        assert failure_cause(RuntimeError(text)) == "error"
    assert failure_cause(UnavailableError("The hub does not answer.")) == "unavailable"


def test_memory_failure_cuts_kv_budget_by_a_fifth(make_world: MakeWorld) -> None:
    """Each memory failure cuts the budget to four fifths, in log and status; other failures do
    not."""
    world = make_world(ranks=2, kv_tokens=10_000)
    world.submit("a", [1, 2, 3], 40)
    budgets = [query_status(world).kv_tokens_max]
    for is_memory in (True, False, True):
        world.step()
        for peer in list(world.ranks):
            fail_rank(world, peer, "RuntimeError: x", cause="memory" if is_memory else "error")
        restart_ranks(world)
        budgets.append(query_status(world).kv_tokens_max)
    world.settle()
    assert budgets == [10_000, 8_000, 8_000, 6_400]
    assert world.tokens["a"] == completion([1, 2, 3], 40)
    status = query_status(world)
    assert status.counters["memory_exhausted_total"] == 2
    assert status.gauges["kv_budget_bytes"] == 64_000
    reductions = [one for one in world.log_lines if one.event == "kv_budget_reduced"]
    assert [one.fields["bytes_max"] for one in reductions] == [80_000, 64_000]


def test_five_memory_failures_fail_world(make_world: MakeWorld) -> None:
    """A device that cannot hold any sequence ends all starts, like every other failure."""
    world = make_world(epochs_failed_max=5)
    for number in range(5):
        world.submit(f"a{number}", [1, 2, 3], 50)
        fail_rank(world, next(iter(world.ranks)), "RuntimeError: x", cause="memory")
        restart_ranks(world)
    assert query_status(world).failure == "epochs"
    assert "RuntimeError: x" in query_status(world).reason
