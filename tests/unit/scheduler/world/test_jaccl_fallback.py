"""Which backend the next epoch uses, and what its ranks are given for it, to the last call."""

import json

import pytest

from services.rank_worker.joining.join import needs_data_port
from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    GatewayMessageReceived,
    RankLost,
    RankMessageReceived,
    SendToRanks,
    WriteLog,
)
from services.scheduler.world import recovery
from shared.configuration.loading import config_from_tree
from shared.identifiers import Epoch, PeerId
from shared.messages import JoinWorld, QueryStatus, RankFailed, RankLoading, StatusReported
from tests.unit.scheduler.in_memory_world import GATEWAY
from tests.unit.scheduler.rank_failures import rank_hello

MATRIX = [[None, "rdma_en5"], ["rdma_en4", None]]


def _jaccl_core(fallback: str = "ring", hostfile: str = "", **scheduler: object) -> SchedulerCore:
    world = {
        "size": 2,
        "backend": "jaccl",
        "jaccl_devices": "unread",
        "jaccl_coordinator": "10.0.0.1:9000",
        "jaccl_fallback": fallback,
    }
    config = config_from_tree({"world": world, "scheduler": scheduler})
    return SchedulerCore(config, json.dumps(MATRIX), hostfile)


def _starts(
    core: SchedulerCore, count: int, hosts: tuple[str, str] = ("mac", "mac"), **changes: object
) -> tuple[list[JoinWorld], list[WriteLog]]:
    """Let epochs fail while they join; return rank 1's orders and what was said."""
    orders: list[JoinWorld] = []
    said: list[WriteLog] = []
    for number in range(count):
        peers = [PeerId(f"rank-{number}-{rank}".encode()) for rank in range(2)]
        events = [
            RankMessageReceived(
                peer, rank_hello(rank, 2 * number + rank, host=hosts[rank], **changes)
            )
            for rank, peer in enumerate(peers)
        ]
        events.append(RankMessageReceived(peers[0], RankLoading(stage="joining", loaded=0.0)))
        actions = [one for event in events for one in core.handle(event, float(number))]
        actions += core.handle(RankLost(peers[1], "goodbye"), float(number))
        said += [one for one in actions if isinstance(one, WriteLog)]
        joins = [
            one.message
            for one in actions
            if isinstance(one, SendToRanks) and isinstance(one.message, JoinWorld)
        ]
        orders += [join for join in joins if join.rank == 1]
    return orders, said


def test_three_failed_starts_of_jaccl_lead_to_ring() -> None:
    """The fourth order is that of a ring world, to the last variable; the log says so, once."""
    core = _jaccl_core()
    orders, said = _starts(core, 4)
    assert [order.backend for order in orders] == ["jaccl", "jaccl", "jaccl", "ring"]
    assert orders[2].environment == {"MLX_RANK": "1", "MLX_JACCL_COORDINATOR": "10.0.0.1:9000"}
    assert json.loads(orders[2].files["MLX_IBV_DEVICES"]) == MATRIX
    assert orders[3].environment == {"MLX_RANK": "1"}
    assert list(orders[3].files) == ["MLX_HOSTFILE"]
    assert json.loads(orders[3].files["MLX_HOSTFILE"]) == [["10.0.0.1:7006"], ["10.0.0.2:7007"]]
    changes = [one for one in said if one.event == "backend_changed"]
    assert len(changes) == 1
    assert changes[0].level == "warning"
    assert "3 starts of jaccl in a row" in changes[0].fields["cause"]
    actions = core.handle(GatewayMessageReceived(GATEWAY, QueryStatus()), 5.0)
    (status,) = [getattr(one, "message", None) for one in actions]
    assert isinstance(status, StatusReported)
    assert (status.backend, status.ready, status.failure) == ("ring", False, "")


def test_jaccl_stays_where_ring_is_not_allowed() -> None:
    """Without the setting every start is jaccl's, until there are too many."""
    orders, _ = _starts(_jaccl_core("none"), 7)
    assert [order.backend for order in orders] == ["jaccl"] * 5


def test_jaccl_stays_where_another_launcher_has_set_it_up() -> None:
    """Ranks of mlx.launch have an environment for jaccl and no address for ring: it is said."""
    orders, said = _starts(_jaccl_core(), 4, launched=True, data_address="")
    assert [order.backend for order in orders] == ["jaccl"] * 4
    assert "backend_not_changed" in [one.event for one in said]


def test_jaccl_stays_where_ranks_could_not_meet_over_ring() -> None:
    """Several machines with addresses that only each itself reaches: the remedy is said, and jaccl
    is tried on, since that may come up; nothing is given up for a way out that there is not."""
    core = _jaccl_core()
    places = {"hosts": ("mac1", "mac2"), "data_address": "127.0.0.1:7000"}
    orders, said = _starts(core, 4, **places)  # type: ignore[arg-type]
    assert [order.backend for order in orders] == ["jaccl"] * 4
    assert core._world.recovery.failure == ""
    (change, *_) = [one for one in said if one.event == "backend_not_changed"]
    assert "rank 0 on mac1 reports 127.0.0.1:7000" in change.fields["cause"]
    assert "set world.data_host" in change.fields["cause"]


def test_ring_takes_its_addresses_from_the_hostfile() -> None:
    """Where that has them, it does not matter what ranks say of themselves."""
    hosts = [
        {"ssh": f"mac{rank}", "ips": [f"10.0.0.{rank}"], "rdma": MATRIX[rank]} for rank in (0, 1)
    ]
    core = _jaccl_core(hostfile=json.dumps({"backend": "jaccl", "envs": [], "hosts": hosts}))
    places = {"hosts": ("mac0", "mac1"), "data_address": "127.0.0.1:7000"}
    orders, _ = _starts(core, 4, **places)  # type: ignore[arg-type]
    assert orders[3].backend == "ring"
    assert "10.0.0.1:" in orders[3].files["MLX_HOSTFILE"]


def test_ranks_that_do_not_meet_for_jaccl_lead_to_ring() -> None:
    """Three starts in a row: ring may take another way."""
    core = _jaccl_core(epochs_failed_max=2)
    backends = []
    for number in range(4):
        for rank in range(2):
            peer = PeerId(f"rank-{number}-{rank}".encode())
            core.handle(
                RankMessageReceived(peer, rank_hello(rank, 2 * number + rank)), float(number)
            )
        backends.append(core._world.recovery.backend)
        failed = RankFailed(
            rank=1, epoch=number + 1, detail="Far.", permanent=False, cause="unavailable"
        )
        core.handle(RankMessageReceived(peer, failed), float(number))
    assert backends == ["jaccl"] * 3 + ["ring"]
    assert core._world.recovery.failure == ""


def test_a_world_that_was_ready_shows_that_jaccl_works() -> None:
    """Only starts in a row count: losing ranks at work never leads to ring."""
    backends = []
    learnt = recovery.Recovery(_jaccl_core(epochs_failed_max=9)._config, [])
    for was_ready in (False, False, True, False, False, False):
        learnt.epoch_failed(recovery.FailedEpoch(Epoch(1), "x", was_ready), 0.0)
        backends.append(learnt.backend)
    assert backends == ["jaccl"] * 5 + ["ring"]


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        ({"size": 1}, False),
        ({"size": 2, "backend": "ring"}, True),
        ({"size": 2, "backend": "nccl"}, True),
        ({"jaccl_fallback": "none"}, False),
        ({"jaccl_fallback": "ring"}, True),
    ],
)
def test_ranks_reserve_a_port_where_ring_may_come(world: dict[str, object], expected: bool) -> None:
    """A rank of jaccl that may fall back names a data address in its hello."""
    if "jaccl_fallback" in world:
        world = {
            "size": 2,
            "backend": "jaccl",
            "jaccl_devices": "unread",
            "jaccl_coordinator": "10.0.0.1:9000",
            **world,
        }
    assert needs_data_port(config_from_tree({"world": world})) is expected


def test_ranks_that_cannot_form_a_world_are_a_configuration_failure() -> None:
    """A rank without an address in a ring world ends in a reason, not in a crash of the core."""
    core = SchedulerCore(config_from_tree({"world": {"size": 2}}))
    for rank, address in enumerate(["127.0.0.1:1", ""]):
        peer = PeerId(f"rank-{rank}".encode())
        core.handle(RankMessageReceived(peer, rank_hello(rank, rank, data_address=address)), 1.0)
    assert core._world.recovery.failure == "configuration"
    assert "as many data addresses" in core._world.explain()
