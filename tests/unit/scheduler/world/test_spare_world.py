"""The spare world: spare processes that load while the world before them serves."""

from typing import Literal

import msgspec
import pytest

from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    Action,
    DrainRequested,
    RankLost,
    RankMessageReceived,
    SendToRanks,
    TimePassed,
)
from services.scheduler.world.spare_world import RETRY_S, STARTS_MAX
from shared.configuration.loading import config_from_tree
from shared.identifiers import PeerId
from shared.messages import (
    CanaryFinding,
    JoinWorld,
    LeaveWorld,
    PlaceTaken,
    RankFailed,
    RankHello,
    RankReady,
)
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, completion
from tests.unit.scheduler.support.rank_failures import fail_rank, lose_rank, query_status
from tests.unit.scheduler.support.rank_messages import READY, rank_hello
from tests.unit.scheduler.support.world_factory import MakeWorld

FINDING = CanaryFinding(name="sum", digest=bytes(16), bytes=4, microseconds=1.0)
PROMPT = list(range(40))
TOKENS = 12


def start_spares(world: InMemoryWorld) -> list[PeerId]:
    """Start a spare process for each rank; return them in rank order."""
    return [world.start_rank(rank, spare=True) for rank in range(world.config.world.size)]


def take_place(world: InMemoryWorld, spare: PeerId, rank: int = 0) -> None:
    """Tell the core that the process of a rank has ended, as its spare does."""
    world.tell(RankMessageReceived(spare, PlaceTaken(rank=rank)))


class ManualWorld:
    """A core with ranks whose messages the test sends one by one."""

    def __init__(self, size: int = 2) -> None:
        self.core = SchedulerCore(config_from_tree({"world": {"size": size}}))
        self.size = size
        self.processes = 0
        self.now_s = 1.0

    def tell(self, peer: bytes, message: RankHello | RankReady | PlaceTaken | RankFailed) -> None:
        """Send one message of a rank process; its actions are dropped."""
        self.act(peer, message)

    def act(
        self, peer: bytes, message: RankHello | RankReady | PlaceTaken | RankFailed
    ) -> list[Action]:
        """Send one message of a rank process; return the actions."""
        return self.core.handle(RankMessageReceived(PeerId(peer), message), self.now_s)

    def start(self, prefix: bytes, *, spare: bool = False, build: str = "") -> list[Action]:
        """Let a process of each rank say hello; return all actions."""
        actions = []
        for rank in range(self.size):
            self.processes += 1
            hello = rank_hello(rank, self.processes, spare=spare, build=build)
            actions += self.act(prefix + b"%d" % rank, hello)
        return actions

    def load(self, prefix: bytes, **changes: object) -> list[Action]:
        """Let all ranks of a world report that they have loaded; return all actions."""
        actions = []
        for rank in range(self.size):
            ready = msgspec.structs.replace(READY, rank=rank, **changes if rank else {})
            actions += self.act(prefix + b"%d" % rank, ready)
        return actions


def serving_world(size: int = 2) -> ManualWorld:
    """Return a world whose first ranks, r0 and so on, serve."""
    world = ManualWorld(size)
    world.start(b"r")
    world.load(b"r")
    return world


def orders(actions: list[Action]) -> dict[bytes, JoinWorld]:
    """Return the orders to join, by peer."""
    return {
        bytes(one.peers[0]): one.message
        for one in actions
        if isinstance(one, SendToRanks) and isinstance(one.message, JoinWorld)
    }


def leaving(actions: list[Action]) -> set[bytes]:
    """Return the peers that are told to leave."""
    found = [
        one.peers
        for one in actions
        if isinstance(one, SendToRanks) and isinstance(one.message, LeaveWorld)
    ]
    return {bytes(peer) for peers in found for peer in peers}


def leave_orders(actions: list[Action]) -> list[LeaveWorld]:
    """Return the orders to leave."""
    messages = [one.message for one in actions if isinstance(one, SendToRanks)]
    return [one for one in messages if isinstance(one, LeaveWorld)]


def test_spares_join_next_epoch_once_world_serves_and_each_rank_has_one() -> None:
    """Spare processes get no order before the world is ready, then that of the next epoch, with the
    KV memory of the ranks whose places they will take."""
    world = ManualWorld()
    world.start(b"r")
    assert not orders(world.start(b"s", spare=True))
    world.tell(b"r0", READY)
    other = msgspec.structs.replace(READY, rank=1, kv_budget_bytes=7_000)
    found = orders(world.act(b"r1", other))
    assert {peer: (one.epoch, one.rank) for peer, one in found.items()} == {
        b"s0": (2, 0),
        b"s1": (2, 1),
    }
    assert [one.kv_budget_bytes for one in found.values()] == [10_000, 7_000]
    assert world.core._world.epoch == 1


def test_spare_world_continues_requests_at_once_when_rank_has_ended(make_world: MakeWorld) -> None:
    """The event that ends the epoch makes the loaded spares the next one: their first plan is among
    its actions, and the completion is that of an undisturbed run."""
    world = make_world(ranks=2)
    spares = start_spares(world)
    assert query_status(world).spare_world == "loaded"
    world.submit("a", PROMPT, TOKENS)
    for _ in range(4):
        world.step()
    assert 0 < len(world.tokens["a"]) < TOKENS
    del world.ranks[next(iter(world.ranks))]
    take_place(world, spares[0])
    assert world.core._world.peers == tuple(spares)
    assert all(world.pending_plans[peer] for peer in spares)
    world.settle()
    assert world.tokens["a"] == completion(PROMPT, TOKENS)
    assert query_status(world).epoch == 2
    assert query_status(world).spare_world == ""


@pytest.mark.parametrize("end", ["lost", "failed"])
def test_spare_world_serves_after_any_end_of_epoch(make_world: MakeWorld, end: str) -> None:
    """A rank that is silent or reports its failure needs no new process for the next epoch."""
    world = make_world(ranks=2)
    spares = start_spares(world)
    if end == "lost":
        lose_rank(world)
    else:
        fail_rank(world, next(iter(world.ranks)), "out of paper")
    assert world.core._world.peers == tuple(spares)
    # The supervisor moves the spares to the places of the ranks afterwards.
    for rank, spare in enumerate(spares):
        take_place(world, spare, rank)
    world.submit("a", PROMPT, TOKENS)
    world.settle()
    assert world.tokens["a"] == completion(PROMPT, TOKENS)


def test_next_spares_begin_after_spares_have_taken_places(make_world: MakeWorld) -> None:
    """A world that was spare gets spares of its own, with an epoch of their own."""
    world = make_world(ranks=1)
    for epoch in (2, 3, 4):
        (spare,) = start_spares(world)
        take_place(world, spare)
        assert query_status(world).epoch == epoch


def test_spares_that_still_load_continue_as_next_epoch() -> None:
    """When the epoch ends before its spares have loaded, they go on loading as the next epoch, and
    no process starts anew."""
    world = serving_world()
    world.start(b"s", spare=True)
    actions = world.act(b"s0", PlaceTaken(rank=0))
    assert leaving(actions) == {b"r0", b"r1"}
    assert not orders(actions)
    assert world.core._world.state.value == "loading"
    world.load(b"s")
    assert world.core._world.state.value == "ready"
    assert world.core._world.epoch == 2


def test_spare_without_spare_world_becomes_rank_when_it_takes_place() -> None:
    """If another rank has no spare yet, spares and new processes form the next epoch together."""
    world = serving_world()
    world.tell(b"s0", rank_hello(0, 50, spare=True))
    assert leaving(world.act(b"s0", PlaceTaken(rank=0))) == {b"r0", b"r1"}
    found = orders(world.act(b"n1", rank_hello(1, 51)))
    assert {peer: one.epoch for peer, one in found.items()} == {b"s0": 2, b"n1": 2}
    assert [one.kv_budget_bytes for one in found.values()] == [0, 0]


def test_spare_that_takes_place_after_hello_of_next_spare_becomes_rank() -> None:
    """The message that a spare has its place may be later than the hello of the spare after it: the
    first becomes the rank, and the other one stays a spare."""
    world = serving_world(1)
    world.core._world.spares._starts_failed = STARTS_MAX
    world.tell(b"s0", rank_hello(0, 50, spare=True))
    world.tell(b"t0", rank_hello(0, 51, spare=True))
    assert orders(world.act(b"s0", PlaceTaken(rank=0))).keys() == {b"s0"}


def test_lost_spare_ends_spare_world_and_nothing_else() -> None:
    """Its peers in the spare world leave, the serving ranks do not notice, and later spares begin
    another epoch."""
    world = serving_world()
    world.start(b"s", spare=True)
    world.load(b"s")
    actions = world.core.handle(RankLost(PeerId(b"s1"), "silent for 10 s"), world.now_s)
    assert leaving(actions) == {b"s0"}
    assert world.core._world.state.value == "ready"
    found = orders(world.start(b"t", spare=True))
    assert {one.epoch for one in found.values()} == {3}


def test_spare_that_was_started_again_ends_spare_world() -> None:
    """A new spare process of a rank shows that the one before has ended."""
    world = serving_world()
    world.start(b"s", spare=True)
    assert leaving(world.act(b"t0", rank_hello(0, 60, spare=True))) == {b"s0", b"s1"}
    assert world.core._world.peers == (b"r0", b"r1")


def test_failed_spare_does_not_end_epoch() -> None:
    """A spare process that lacks memory, even for good, only ends the spare world."""
    world = serving_world()
    world.start(b"s", spare=True)
    failed = RankFailed(rank=0, epoch=2, detail="no memory", permanent=True, cause="memory")
    assert leaving(world.act(b"s0", failed)) == {b"s1"}
    assert world.core._world.state.value == "ready"
    assert not world.core._world.recovery.failure


@pytest.mark.parametrize("changes", [{"model_fingerprint": "other"}, {"canary": [FINDING]}])
def test_spares_that_differ_end_spare_world(changes: dict[str, object]) -> None:
    """Spares with different models or canaries must not serve together; they start again a few
    times only."""
    world = serving_world()
    for number in range(STARTS_MAX):
        prefix = b"%d-" % number
        assert orders(world.start(prefix, spare=True))
        actions = world.load(prefix, **changes)
        assert leaving(actions) == {prefix + b"0", prefix + b"1"}
    assert not orders(world.start(b"x", spare=True))
    assert world.core._world.state.value == "ready"


def test_spares_load_no_more_after_failed_starts(make_world: MakeWorld) -> None:
    """After several failed starts in a row spares get no order, and the status says so."""
    world = serving_world()
    for number in range(STARTS_MAX):
        assert orders(world.start(b"%d-" % number, spare=True))
        failed = RankFailed(rank=0, epoch=1, detail="no memory", permanent=False, cause="memory")
        world.tell(b"%d-0" % number, failed)
    assert not orders(world.start(b"x", spare=True))
    assert "too many" in world.core._world.spares.explain()
    # As ranks they serve nevertheless.
    world.tell(b"x0", PlaceTaken(rank=0))
    assert orders(world.act(b"x1", PlaceTaken(rank=1))).keys() == {b"x0", b"x1"}


def test_spares_with_differing_canaries_leave_because_of_them() -> None:
    """A rank then no longer trusts Metal's fast synchronization, as after a world's canary."""
    world = serving_world()
    world.start(b"s", spare=True)
    for rank, digest in enumerate((bytes(16), bytes([1] * 16))):
        finding = msgspec.structs.replace(FINDING, digest=digest)
        ready = msgspec.structs.replace(READY, rank=rank, canary=[finding])
        actions = world.act(b"s%d" % rank, ready)
    assert [one.cause for one in leave_orders(actions)] == ["canary"]


def test_failed_starts_are_forgotten_after_a_while_and_a_missing_service_is_no_failure() -> None:
    """A hub that is away for a moment, or memory that another program used, may be there again."""
    world = serving_world(1)
    causes: list[Literal["memory", "unavailable"]] = ["memory", "memory", "unavailable", "memory"]
    for number, cause in enumerate(causes):
        assert orders(world.start(b"%d-" % number, spare=True))
        failed = RankFailed(rank=0, epoch=1, detail="x", permanent=False, cause=cause)
        world.tell(b"%d-0" % number, failed)
    assert not orders(world.start(b"x", spare=True))
    world.now_s += RETRY_S
    assert orders(world.start(b"y", spare=True))


def test_spares_that_left_out_prompt_of_canary_do_not_serve_after_doubtful_results() -> None:
    """When results were wrong, the next canary runs whole: a spare world that began before leaves,
    unless its own canary was whole."""
    for is_whole in (False, True):
        world = ManualWorld(1)
        world.start(b"r", build="1")
        world.load(b"r")
        if is_whole:
            world.core._world.passed_canary.forget()
        (order,) = orders(world.start(b"s", spare=True, build="1")).values()
        assert order.canary_prompt == is_whole
        world.load(b"s")
        world.core._world.passed_canary.forget()
        failed = RankFailed(rank=0, epoch=1, detail="x", permanent=False)
        assert leaving(world.act(b"r0", failed)) == (set() if is_whole else {b"s0"})


def test_ended_process_is_not_listed_as_dismissed_after_its_spare_has_its_place() -> None:
    """Its process id may belong to another process, which a supervisor must not kill."""
    world = serving_world()
    world.start(b"s", spare=True)
    world.load(b"s")
    world.tell(b"s0", PlaceTaken(rank=0))
    assert [one.pid for one in world.core._world.dismissed.report(2.0)] == [102]
    # The other rank has obeyed, and its spare has its place as well.
    world.tell(b"s1", PlaceTaken(rank=1))
    assert not world.core._world.dismissed.report(2.0)


def test_new_process_of_rank_shows_that_its_spare_has_ended_too() -> None:
    """The supervisor would have used the spare, so the spare world is not the next epoch."""
    world = serving_world()
    world.start(b"s", spare=True)
    world.load(b"s")
    assert leaving(world.act(b"n0", rank_hello(0, 70))) == {b"r0", b"r1", b"s0", b"s1"}
    assert world.core._world.state.value == "gathering"


def test_spares_that_continue_loading_may_lack_room_without_ending_all_attempts() -> None:
    """They began beside another world, so their permanent failure is not one of new processes."""
    world = serving_world(1)
    world.start(b"s", spare=True)
    world.tell(b"s0", PlaceTaken(rank=0))
    failed = RankFailed(rank=0, epoch=2, detail="No room.", permanent=True)
    world.tell(b"s0", failed)
    assert world.core._world.state.value == "gathering"
    assert orders(world.start(b"n")).keys() == {b"n0"}


def test_status_names_ranks_whose_spares_are_missing() -> None:
    """A spare world never begins if a host keeps no spare processes."""
    world = serving_world()
    world.tell(b"s1", rank_hello(1, 80, spare=True))
    assert world.core._world.spares.explain() == "waiting for those of rank 0"


def test_spares_that_do_not_load_in_time_leave() -> None:
    """The deadlines of joining and loading hold for a spare world too."""
    world = serving_world(1)
    world.start(b"s", spare=True)
    left = set()
    for now_s in range(1, 70):
        left |= leaving(world.core.handle(TimePassed(), float(now_s)))
    assert left == {b"s0"}
    assert world.core._world.state.value == "ready"


def test_stopping_scheduler_dismisses_spares() -> None:
    """The spare world ends with the scheduler, as the ranks do."""
    world = serving_world(1)
    world.start(b"s", spare=True)
    assert leaving(world.core.handle(DrainRequested(), 2.0)) == {b"r0", b"s0"}


def test_spares_leave_when_no_further_epoch_may_start() -> None:
    """A world that has failed for good keeps no processes with weights."""
    world = serving_world(1)
    world.start(b"s", spare=True)
    failed = RankFailed(rank=0, epoch=1, detail="No such model.", permanent=True)
    assert leaving(world.act(b"r0", failed)) == {b"s0"}
    assert world.core._world.state.value == "failed"


def test_hello_of_spare_does_not_prove_that_dismissed_rank_has_ended() -> None:
    """A process that was told to leave stays listed when a spare of its rank says hello, so that
    its supervisor kills it."""
    world = serving_world(1)
    world.tell(b"r0", RankFailed(rank=0, epoch=1, detail="x", permanent=False))
    world.start(b"s", spare=True)
    assert [one.pid for one in world.core._world.dismissed.report(2.0)] == [101]
