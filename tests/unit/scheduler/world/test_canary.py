"""What the scheduler makes of the canaries' findings: who differs, and what happens then."""

import json

import msgspec
import pytest

from services.scheduler.core import SchedulerCore
from services.scheduler.events import Action, RankMessageReceived, SendToRanks
from services.scheduler.world.canary_comparison import explain_difference, explain_mismatch
from shared.configuration.loading import config_from_tree
from shared.identifiers import PeerId
from shared.messages import CanaryFinding, JoinWorld, RankFailed, RankReady
from tests.unit.scheduler.rank_failures import rank_hello

SUM, PROMPT = "sum of 4 KiB of float32", "prompt of 4,500 tokens"
READY = RankReady(
    rank=0,
    model_fingerprint="same",
    kv_bytes_per_token=10,
    kv_bytes_per_row=0,
    kv_budget_bytes=10_000_000,
    context_tokens_max=10_000,
    vocab_size=10,
    can_roll_back=True,
    blas="",
)


def found(*digests: str) -> list[CanaryFinding]:
    """Return findings with these digests: the sum's, then the prompt's."""
    return [
        CanaryFinding(name=name, digest=digest.encode().ljust(16), bytes=1, microseconds=1.0)
        for name, digest in zip((SUM, PROMPT), digests, strict=False)
    ]


def ready(rank: int, *digests: str) -> RankReady:
    """Return what a rank says that has found these."""
    return msgspec.structs.replace(READY, rank=rank, canary=found(*digests))


def test_equal_findings_are_no_difference() -> None:
    """Nor are none at all, as where the canary is off."""
    assert explain_difference([ready(0, "a", "b"), ready(1, "a", "b")]) is None
    assert explain_difference([ready(0), ready(1)]) is None


def test_who_differs_from_most_is_named() -> None:
    """The ranks in the minority, and what they got otherwise; one sentence."""
    reports = [ready(0, "a", "b"), ready(1, "x", "y"), ready(2, "a", "b"), ready(3, "a", "b")]
    assert explain_difference(reports) == (
        f"The canary differs: rank 1 got another result than most for the {SUM} (and 1 more)."
    )
    reports = [ready(rank, "a", "x" if rank in (1, 4) else "b") for rank in range(5)]
    assert explain_difference(reports) == (
        f"The canary differs: ranks 1, 4 got another result than most for the {PROMPT}."
    )


def test_two_ranks_have_no_majority() -> None:
    """Then nobody can be named, and both are shown."""
    assert explain_difference([ready(0, "a", "b"), ready(1, "a", "c")]) == (
        f"The canary differs: no result of the {PROMPT} has a majority "
        "(rank 0 62202020, rank 1 63202020)."
    )


def test_ranks_that_computed_other_things_are_no_world() -> None:
    """One of another version, say, that lacks a finding: the numbers are named."""
    sentence = explain_mismatch([ready(0, "a", "b"), ready(1, "a")], ["mac1", "mac2"])
    assert sentence is not None
    assert "(rank 0 on mac1 2 findings, rank 1 on mac2 1 findings)" in sentence
    assert explain_mismatch([ready(0, "a", "b"), ready(1, "x", "y")], ["mac1", "mac2"]) is None


def _core(**world: object) -> SchedulerCore:
    world = {"size": 2, **world}
    if world.get("backend") == "jaccl":
        world |= {"jaccl_devices": "unread", "jaccl_coordinator": "10.0.0.1:9000"}
    matrix = json.dumps([[None, "rdma_en5"], ["rdma_en4", None]])
    return SchedulerCore(config_from_tree({"world": world}), matrix)


class Starts:
    """Starts of two ranks, again and again."""

    def __init__(self, core: SchedulerCore) -> None:
        self.core = core
        self.count = 0
        self.backends: list[str] = []

    def start(self) -> list[PeerId]:
        """Bring up two processes; note over what they are to join."""
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
        """Let both be ready with unequal findings."""
        for rank, peer in enumerate(self.start()):
            told = RankMessageReceived(peer, ready(rank, "a", "bc"[rank]))
            self.core.handle(told, float(self.count))

    def fail(self, *, is_first: bool = True) -> None:
        """Let rank 1 find its sums to be wrong, and its peer lose it."""
        peers = self.start()
        failed = RankFailed(
            rank=1, epoch=self.count, detail="A sum.", permanent=False, cause="canary"
        )
        lost = msgspec.structs.replace(failed, rank=0, cause="error", detail="Lost.")
        told = [RankMessageReceived(peers[1], failed), RankMessageReceived(peers[0], lost)]
        for one in told if is_first else reversed(told):
            self.core.handle(one, float(self.count))

    def fail_second(self) -> None:
        """The same, and its peer is heard first."""
        self.fail(is_first=False)

    def lack(self) -> None:
        """Let rank 1 have computed less than rank 0."""
        for rank, peer in enumerate(self.start()):
            told = RankMessageReceived(peer, ready(rank, *["a", "b"][: 2 - rank]))
            self.core.handle(told, float(self.count))

    def agree(self) -> list[PeerId]:
        """Let both be ready with equal findings."""
        peers = self.start()
        for rank, peer in enumerate(peers):
            self.core.handle(RankMessageReceived(peer, ready(rank, "a", "b")), float(self.count))
        return peers


@pytest.mark.parametrize("how", ["differ", "fail", "fail_second"])
def test_wrong_sums_never_serve(how: str) -> None:
    """A world whose canary fails is not ready; after the second in a row no other is tried."""
    core = _core()
    starts = Starts(core)
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


def test_a_canary_that_passes_forgives_the_one_before() -> None:
    """Only failed canaries with none that passed between them end all trying."""
    core = _core()
    starts = Starts(core)
    for _ in range(2):
        starts.differ()
        peers = starts.agree()
        assert core._world.was_ready
        failed = RankFailed(rank=0, epoch=1, detail="x", permanent=False)
        core.handle(RankMessageReceived(peers[0], failed), float(starts.count))
    assert core._world.recovery.failure == ""


@pytest.mark.parametrize("how", ["differ", "fail", "fail_second"])
def test_jaccl_is_left_at_once(how: str) -> None:
    """One failed canary over jaccl is enough for ring, where ring is allowed."""
    core = _core(backend="jaccl", jaccl_fallback="ring")
    starts = Starts(core)
    getattr(starts, how)()
    starts.agree()
    assert starts.backends == ["jaccl", "ring"]
    assert core._world.was_ready


def test_unequal_ranks_are_refused_at_once() -> None:
    """They compute the same things at no other start either, and ring is no remedy."""
    core = _core(backend="jaccl", jaccl_fallback="ring")
    Starts(core).lack()
    recovery = core._world.recovery
    assert (recovery.failure, recovery.backend) == ("configuration", "jaccl")
    assert "start the same version of Lockstep" in core._world.explain()


def test_jaccl_that_fails_its_canary_is_refused_without_a_fallback() -> None:
    """Nothing else is allowed, so nothing serves."""
    starts = Starts(_core(backend="jaccl"))
    starts.differ()
    starts.differ()
    starts.start()
    assert starts.backends == ["jaccl", "jaccl"]
    assert starts.core._world.recovery.failure == "epochs"


def test_ring_is_not_trusted_either() -> None:
    """After the fall back to ring the canary counts anew, and ends all trying as well."""
    starts = Starts(_core(backend="jaccl", jaccl_fallback="ring"))
    for _ in range(3):
        starts.differ()
    assert starts.backends == ["jaccl", "ring", "ring"]
    assert starts.core._world.recovery.failure == "epochs"


def test_status_shows_what_each_rank_has_found() -> None:
    """Findings and the shard's bytes are part of a rank's status."""
    core = _core()
    peers = Starts(core).start()
    for rank, peer in enumerate(peers):
        one = msgspec.structs.replace(ready(rank, "a", "b"), shard_bytes=7 + rank)
        core.handle(RankMessageReceived(peer, one), 2.0)
    statuses = core._world.statuses()
    assert [one.shard_bytes for one in statuses] == [7, 8]
    assert [one.canary for one in statuses] == [found("a", "b")] * 2
