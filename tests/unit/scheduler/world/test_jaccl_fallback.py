"""Choice of the backend of the next epoch, and the ranks' environment for it."""

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
from tests.unit.scheduler.support.in_memory_world import GATEWAY
from tests.unit.scheduler.support.rank_messages import rank_hello

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


def _fail_starts(
    core: SchedulerCore, count: int, hosts: tuple[str, str] = ("mac", "mac"), **changes: object
) -> tuple[list[JoinWorld], list[WriteLog]]:
    """Let epochs fail while they join; return rank 1's orders and the log lines."""
    orders: list[JoinWorld] = []
    log_lines: list[WriteLog] = []
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
        log_lines += [one for one in actions if isinstance(one, WriteLog)]
        joins = [
            one.message
            for one in actions
            if isinstance(one, SendToRanks) and isinstance(one.message, JoinWorld)
        ]
        orders += [join for join in joins if join.rank == 1]
    return orders, log_lines


def test_world_starts_over_ring_after_three_failed_jaccl_starts() -> None:
    """The fourth order is that of a ring world in every variable, and the log reports it once."""
    core = _jaccl_core()
    orders, log_lines = _fail_starts(core, 4)
    assert [order.backend for order in orders] == ["jaccl", "jaccl", "jaccl", "ring"]
    assert orders[2].environment == {"MLX_RANK": "1", "MLX_JACCL_COORDINATOR": "10.0.0.1:9000"}
    assert json.loads(orders[2].files["MLX_IBV_DEVICES"]) == MATRIX
    assert orders[3].environment == {"MLX_RANK": "1"}
    assert list(orders[3].files) == ["MLX_HOSTFILE"]
    assert json.loads(orders[3].files["MLX_HOSTFILE"]) == [["10.0.0.1:7006"], ["10.0.0.2:7007"]]
    changes = [one for one in log_lines if one.event == "backend_changed"]
    assert len(changes) == 1
    assert changes[0].level == "warning"
    assert "3 starts of jaccl in a row" in changes[0].fields["cause"]
    actions = core.handle(GatewayMessageReceived(GATEWAY, QueryStatus()), 5.0)
    (status,) = [getattr(one, "message", None) for one in actions]
    assert isinstance(status, StatusReported)
    assert (status.backend, status.ready, status.failure) == ("ring", False, "")


def test_every_start_uses_jaccl_when_fallback_is_not_allowed() -> None:
    """Without the setting every start uses jaccl, until the limit of failed epochs."""
    orders, _ = _fail_starts(_jaccl_core("none"), 7)
    assert [order.backend for order in orders] == ["jaccl"] * 5


def test_ranks_started_by_mlx_launch_stay_on_jaccl_after_failures() -> None:
    """Ranks of mlx.launch have an environment for jaccl and no address for ring; the log says
    so."""
    orders, log_lines = _fail_starts(_jaccl_core(), 4, launched=True, data_address="")
    assert [order.backend for order in orders] == ["jaccl"] * 4
    assert "backend_not_changed" in [one.event for one in log_lines]


def test_world_stays_on_jaccl_when_ring_addresses_are_loopback() -> None:
    """When ring addresses reach only their own machine, the log names the remedy and jaccl is tried
    on."""
    core = _jaccl_core()
    places = {"hosts": ("mac1", "mac2"), "data_address": "127.0.0.1:7000"}
    orders, log_lines = _fail_starts(core, 4, **places)  # type: ignore[arg-type]
    assert [order.backend for order in orders] == ["jaccl"] * 4
    assert core._world.recovery.failure == ""
    (change, *_) = [one for one in log_lines if one.event == "backend_not_changed"]
    assert "rank 0 on mac1 reports 127.0.0.1:7000" in change.fields["cause"]
    assert "set world.data_host" in change.fields["cause"]


def test_ring_fallback_uses_addresses_of_hostfile_instead_of_reported_ones() -> None:
    """With addresses in the hostfile, the addresses that ranks report do not matter."""
    hosts = [
        {"ssh": f"mac{rank}", "ips": [f"10.0.0.{rank}"], "rdma": MATRIX[rank]} for rank in (0, 1)
    ]
    core = _jaccl_core(hostfile=json.dumps({"backend": "jaccl", "envs": [], "hosts": hosts}))
    places = {"hosts": ("mac0", "mac1"), "data_address": "127.0.0.1:7000"}
    orders, _ = _fail_starts(core, 4, **places)  # type: ignore[arg-type]
    assert orders[3].backend == "ring"
    assert "10.0.0.1:" in orders[3].files["MLX_HOSTFILE"]


def test_world_starts_over_ring_after_three_unavailable_jaccl_starts() -> None:
    """Three starts with cause `unavailable` lead to ring, which may use another network path."""
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


def test_ready_world_resets_count_of_failed_jaccl_starts() -> None:
    """Only failed starts in a row count; a rank lost from a ready world does not."""
    backends = []
    state = recovery.Recovery(_jaccl_core(epochs_failed_max=9)._config, [])
    for was_ready in (False, False, True, False, False, False):
        state.epoch_failed(recovery.FailedEpoch(Epoch(1), "x", was_ready), 0.0)
        backends.append(state.backend)
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
def test_jaccl_rank_reports_data_address_when_ring_fallback_is_possible(
    world: dict[str, object], expected: bool
) -> None:
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


def test_rank_without_data_address_in_ring_world_is_configuration_failure() -> None:
    """A rank without a data address in a ring world ends in a reason instead of a crash."""
    core = SchedulerCore(config_from_tree({"world": {"size": 2}}))
    for rank, address in enumerate(["127.0.0.1:1", ""]):
        peer = PeerId(f"rank-{rank}".encode())
        core.handle(RankMessageReceived(peer, rank_hello(rank, rank, data_address=address)), 1.0)
    assert core._world.recovery.failure == "configuration"
    assert "as many data addresses" in core._world.explain()
