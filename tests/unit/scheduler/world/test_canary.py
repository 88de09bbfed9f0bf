"""Comparison of the ranks' canary findings, and the scheduler's reaction to a failed canary."""

import json

import msgspec
import pytest

from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    Action,
    RankLost,
    RankMessageReceived,
    SendToRanks,
    TimePassed,
)
from services.scheduler.world.canary_comparison import explain_difference, explain_mismatch
from services.scheduler.world.passed_canary import VALID_S, PassedCanary
from services.scheduler.world.world import WorldState
from shared.configuration.loading import config_from_tree
from shared.identifiers import PeerId
from shared.messages import CanaryFinding, JoinWorld, LeaveWorld, RankFailed, RankReady
from shared.messages.base import Sharding
from tests.unit.scheduler.support.rank_messages import READY, rank_hello

SUM, PROMPT = "sum of 4 KiB of float32", "prompt of 4,500 tokens"
REPORT = msgspec.structs.replace(READY, kv_budget_bytes=10_000_000, context_tokens_max=10_000)


def findings(*digests: str) -> list[CanaryFinding]:
    """Return findings with these digests: the sum's, then the prompt's."""
    return [
        CanaryFinding(name=name, digest=digest.encode().ljust(16), bytes=1, microseconds=1.0)
        for name, digest in zip((SUM, PROMPT), digests, strict=False)
    ]


def rank_ready(rank: int, *digests: str) -> RankReady:
    """Return the report of a rank with these findings."""
    return msgspec.structs.replace(REPORT, rank=rank, canary=findings(*digests))


def test_equal_or_absent_canary_results_give_no_error() -> None:
    """Equal canary results give no error, and neither do absent ones when the canary is off."""
    assert explain_difference([rank_ready(0, "a", "b"), rank_ready(1, "a", "b")]) is None
    assert explain_difference([rank_ready(0), rank_ready(1)]) is None


def test_canary_error_names_ranks_differing_from_majority() -> None:
    """The message names the ranks that differ from the majority, and the first differing result."""
    reports = [
        rank_ready(0, "a", "b"),
        rank_ready(1, "x", "y"),
        rank_ready(2, "a", "b"),
        rank_ready(3, "a", "b"),
    ]
    assert explain_difference(reports) == (
        f"The canary differs: rank 1 got another result than most for the {SUM} (and 1 more)."
    )
    reports = [rank_ready(rank, "a", "x" if rank in (1, 4) else "b") for rank in range(5)]
    assert explain_difference(reports) == (
        f"The canary differs: ranks 1, 4 got another result than most for the {PROMPT}."
    )


def test_canary_error_of_two_ranks_shows_both_digests() -> None:
    """Without a majority the message shows both digests."""
    assert explain_difference([rank_ready(0, "a", "b"), rank_ready(1, "a", "c")]) == (
        f"The canary differs: no result of the {PROMPT} has a majority "
        "(rank 0 62202020, rank 1 63202020)."
    )


def test_ranks_with_different_number_of_canary_results_are_named() -> None:
    """Ranks with different numbers of canary results, for example of another version, are named
    with both numbers."""
    sentence = explain_mismatch([rank_ready(0, "a", "b"), rank_ready(1, "a")], ["mac1", "mac2"])
    assert sentence is not None
    assert "(rank 0 on mac1 2 findings, rank 1 on mac2 1 findings)" in sentence
    assert (
        explain_mismatch([rank_ready(0, "a", "b"), rank_ready(1, "x", "y")], ["mac1", "mac2"])
        is None
    )


def _core(**world: object) -> SchedulerCore:
    world = {"size": 2, **world}
    if world.get("backend") == "jaccl":
        world |= {"jaccl_devices": "unread", "jaccl_coordinator": "10.0.0.1:9000"}
    matrix = json.dumps([[None, "rdma_en5"], ["rdma_en4", None]])
    return SchedulerCore(config_from_tree({"world": world}), matrix)


class WorldStarts:
    """Repeated starts of two ranks."""

    def __init__(self, core: SchedulerCore) -> None:
        self.core = core
        self.count = 0
        self.backends: list[str] = []

    def start(self) -> list[PeerId]:
        """Start two processes; record the backend that they are to join."""
        self.count += 1
        peers = [PeerId(f"rank-{self.count}-{rank}".encode()) for rank in range(2)]
        actions: list[Action] = []
        for rank, peer in enumerate(peers):
            told = RankMessageReceived(peer, rank_hello(rank, 2 * self.count + rank))
            actions += self.core.handle(told, float(self.count))
        joins = [
            one.message
            for one in actions
            if isinstance(one, SendToRanks) and isinstance(one.message, JoinWorld)
        ]
        self.backends += [join.backend for join in joins if join.rank == 0]
        return peers

    def differ(self) -> None:
        """Let both ranks be ready with different findings."""
        for rank, peer in enumerate(self.start()):
            told = RankMessageReceived(peer, rank_ready(rank, "a", "bc"[rank]))
            self.core.handle(told, float(self.count))

    def fail(self, *, is_first: bool = True) -> None:
        """Let rank 1 report wrong sums, and rank 0 report that it lost rank 1."""
        peers = self.start()
        failed = RankFailed(
            rank=1, epoch=self.count, detail="A sum.", permanent=False, cause="canary"
        )
        lost = msgspec.structs.replace(failed, rank=0, cause="error", detail="Lost.")
        told = [RankMessageReceived(peers[1], failed), RankMessageReceived(peers[0], lost)]
        for one in told if is_first else reversed(told):
            self.core.handle(one, float(self.count))

    def fail_second(self) -> None:
        """Do as `fail`, with rank 0 first."""
        self.fail(is_first=False)

    def omit_finding(self) -> None:
        """Let rank 1 report fewer findings than rank 0."""
        for rank, peer in enumerate(self.start()):
            told = RankMessageReceived(peer, rank_ready(rank, *["a", "b"][: 2 - rank]))
            self.core.handle(told, float(self.count))

    def agree(self) -> list[PeerId]:
        """Let both ranks be ready with equal findings."""
        peers = self.start()
        for rank, peer in enumerate(peers):
            self.core.handle(
                RankMessageReceived(peer, rank_ready(rank, "a", "b")), float(self.count)
            )
        return peers


@pytest.mark.parametrize("how", ["differ", "fail", "fail_second"])
def test_world_with_failed_canary_is_never_ready(how: str) -> None:
    """A world whose canary fails is not ready, and after the second failure in a row no other is
    started."""
    core = _core()
    starts = WorldStarts(core)
    for _ in range(2):
        assert not core._world.was_ready
        assert core._world.recovery.failure == ""
        getattr(starts, how)()
    assert not core._world.was_ready
    assert core._world.recovery.failure == "epochs"
    reason = core._world.explain()
    assert reason.startswith("The ranks compute wrong numbers together, 2 starts in a row: ")
    named = "rank 0 62202020, rank 1 63202020" if how == "differ" else "Rank 1 failed: A sum."
    assert named in reason
    starts.start()
    assert starts.backends == ["ring", "ring"]


def test_passed_canary_resets_count_of_failed_canaries() -> None:
    """Only failures without a passed canary between them end all starts."""
    core = _core()
    starts = WorldStarts(core)
    for _ in range(2):
        starts.differ()
        peers = starts.agree()
        assert core._world.was_ready
        failed = RankFailed(rank=0, epoch=1, detail="x", permanent=False)
        core.handle(RankMessageReceived(peers[0], failed), float(starts.count))
    assert core._world.recovery.failure == ""


@pytest.mark.parametrize("how", ["differ", "fail", "fail_second"])
def test_world_falls_back_to_ring_after_failed_canary_over_jaccl(how: str) -> None:
    """One failed canary over jaccl is enough for ring, where the fallback is allowed."""
    core = _core(backend="jaccl", jaccl_fallback="ring")
    starts = WorldStarts(core)
    getattr(starts, how)()
    starts.agree()
    assert starts.backends == ["jaccl", "ring"]
    assert core._world.was_ready


def test_ranks_of_different_versions_are_configuration_failure() -> None:
    """Ranks of different versions are a configuration failure: no other start and no fallback is
    tried."""
    core = _core(backend="jaccl", jaccl_fallback="ring")
    WorldStarts(core).omit_finding()
    recovery = core._world.recovery
    assert (recovery.failure, recovery.backend) == ("configuration", "jaccl")
    assert "start the same version of Lockstep" in core._world.explain()


def test_second_failed_canary_over_jaccl_without_fallback_fails_world() -> None:
    """Without an allowed fallback the second failure ends all starts."""
    starts = WorldStarts(_core(backend="jaccl"))
    starts.differ()
    starts.differ()
    starts.start()
    assert starts.backends == ["jaccl", "jaccl"]
    assert starts.core._world.recovery.failure == "epochs"


def test_second_failed_canary_over_ring_fallback_fails_world() -> None:
    """After the fallback to ring the failures count anew, and end all starts as well."""
    starts = WorldStarts(_core(backend="jaccl", jaccl_fallback="ring"))
    for _ in range(3):
        starts.differ()
    assert starts.backends == ["jaccl", "ring", "ring"]
    assert starts.core._world.recovery.failure == "epochs"


def test_status_shows_canary_results_of_each_rank() -> None:
    """The status of each rank shows its canary results and the size of its shard."""
    core = _core()
    peers = WorldStarts(core).start()
    for rank, peer in enumerate(peers):
        one = msgspec.structs.replace(rank_ready(rank, "a", "b"), shard_bytes=7 + rank)
        core.handle(RankMessageReceived(peer, one), 2.0)
    statuses = core._world.statuses()
    assert [one.shard_bytes for one in statuses] == [7, 8]
    assert [one.canary for one in statuses] == [findings("a", "b")] * 2


# --- dismissal: ranks withdraw their proofs -------------------------------------------------------

PEERS = [PeerId(b"rank-0"), PeerId(b"rank-1")]


def _leave_orders(*messages: RankMessageReceived) -> list[LeaveWorld]:
    """Return the orders to leave after two ranks have joined and sent these messages."""
    world = {"size": 2, "backend": "jaccl", "jaccl_devices": "x", "jaccl_coordinator": "a:1"}
    matrix = json.dumps([[None, "rdma_en5"], ["rdma_en4", None]])
    core = SchedulerCore(config_from_tree({"world": world}), matrix)
    actions: list[Action] = []
    for rank, peer in enumerate(PEERS):
        actions += core.handle(RankMessageReceived(peer, rank_hello(rank, rank)), 1.0)
    for one in messages:
        actions += core.handle(one, 2.0)
    sent = [action.message for action in actions if isinstance(action, SendToRanks)]
    return [one for one in sent if isinstance(one, LeaveWorld)]


def test_ranks_with_different_canary_results_are_dismissed_with_cause_canary() -> None:
    """Ranks with different canary results are dismissed with the cause canary, because only the
    scheduler compares them."""
    messages = [
        RankMessageReceived(peer, rank_ready(rank, "a", "bc"[rank]))
        for rank, peer in enumerate(PEERS)
    ]

    (order,) = _leave_orders(*messages)

    assert order.cause == "canary"
    assert order.detail.startswith("The canary differs: ")


@pytest.mark.parametrize(("cause", "is_canary"), [("canary", True), ("memory", False)])
def test_dismissal_has_cause_canary_only_for_failed_canary(cause: str, is_canary: bool) -> None:
    """A peer's wrong sum is a failed canary for all ranks; its lack of memory is not."""
    failed = RankFailed(
        rank=1,
        epoch=1,
        detail="A failure.",
        permanent=False,
        cause=cause,  # type: ignore[arg-type]
    )

    (order,) = _leave_orders(RankMessageReceived(PEERS[1], failed))

    assert order.detail.endswith("Rank 1 failed: A failure.")
    assert (order.cause == "canary") == is_canary


def _wants_prompt(core: SchedulerCore, number: int, now_s: float, **changes: object) -> bool:
    """Let a rank be ready and be lost; return whether its order has a prompt in the canary."""
    peer = PeerId(f"rank-{number}".encode())
    hello = rank_hello(0, number, **{"build": "1 abc", **changes})
    actions = core.handle(RankMessageReceived(peer, hello), now_s)
    (order,) = [
        one.message
        for one in actions
        if isinstance(one, SendToRanks) and isinstance(one.message, JoinWorld)
    ]
    core.handle(TimePassed(), now_s)
    digests = ("a", "b") if order.canary_prompt else ("a",)
    core.handle(RankMessageReceived(peer, rank_ready(0, *digests)), now_s)
    assert core._world.state is WorldState.READY
    core.handle(RankLost(peer, "its connection is gone"), now_s)
    return order.canary_prompt


def test_prompt_of_canary_runs_once_an_hour_for_equal_machines_and_code() -> None:
    """A rank that takes the place of a killed one serves sooner; new machines or code do not."""
    core = SchedulerCore(config_from_tree({"world": {"size": 1}}))
    assert _wants_prompt(core, 1, 100.0)
    assert not _wants_prompt(core, 2, 200.0)
    # A canary without a prompt does not extend the hour.
    assert not _wants_prompt(core, 3, 100.0 + VALID_S - 1.0)
    assert _wants_prompt(core, 4, 100.0 + VALID_S)
    for number, changes in enumerate(
        [{"host": "other"}, {"device": "other"}, {"mlx_version": "2"}, {"build": "1 def"},
         {"build": ""}, {"build": ""}]
    ):  # fmt: skip
        assert _wants_prompt(core, 10 + number, 5_000.0, **changes), changes


def test_prompt_of_canary_runs_again_after_ranks_that_differed_or_an_epoch_without_tokens() -> None:
    """Results are in doubt then, so nothing that passed before counts."""
    core = SchedulerCore(config_from_tree({"world": {"size": 1}}))
    assert _wants_prompt(core, 1, 100.0)
    core._world.passed_canary.forget()
    assert _wants_prompt(core, 2, 100.0)
    # A rank that is lost before it has loaded counts as a failed start.
    peer = PeerId(b"rank-3")
    core.handle(RankMessageReceived(peer, rank_hello(0, 3, build="1 abc")), 100.0)
    core.handle(RankLost(peer, "its connection is gone"), 100.0)
    assert _wants_prompt(core, 4, 100.0)


@pytest.mark.parametrize(
    ("sharding", "runs_again"), [("tensor", False), ("tensor+expert", True), ("pipeline", True)]
)
def test_other_memory_counts_where_shares_of_the_model_follow_from_it(
    sharding: Sharding, runs_again: bool
) -> None:
    """Free memory of a host changes all the time, but a tensor split is always equal."""
    passed = PassedCanary(sharding)
    ranks = [rank_hello(rank, rank, build="1 abc", memory_bytes=10) for rank in range(2)]
    passed.note("ring", ranks, 100.0)
    ranks[1] = rank_hello(1, 7, build="1 abc", memory_bytes=11)
    assert passed.covers("ring", ranks, 101.0) is not runs_again
    assert not passed.covers("jaccl", ranks, 101.0)
