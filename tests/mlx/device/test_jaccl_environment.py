"""Environment that MLX reads when a rank initializes jaccl, starting from a hostfile.

The test machines have no RDMA, so `mx.distributed.init` is replaced by a function that records its
environment.
"""

import errno
import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from services.rank_worker.joining import join
from services.rank_worker.peers import collectives
from services.scheduler.core import SchedulerCore
from services.scheduler.events import RankMessageReceived, SendToRanks
from shared.configuration.loading import load_config, read_world_files
from shared.errors import ConfigError, PeerEnded, WorldLost
from shared.identifiers import PeerId
from shared.messages import JoinWorld
from tests.mlx.sharding.in_process_world import FakeGroup
from tests.support.orders import rank_hello

_READ_BY_JACCL = (
    *("MLX_RANK", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_JACCL_RING"),
    *("JACCL_RANK", "JACCL_IBV_DEVICES", "JACCL_COORDINATOR", "JACCL_RING"),
    "MLX_METAL_FAST_SYNCH",
)
PAIR = [[None, "rdma_en5"], ["rdma_en4", None]]
MESH_4 = [
    [None, "rdma_en5", "rdma_en4", "rdma_en3"],
    ["rdma_en5", None, "rdma_en3", "rdma_en4"],
    ["rdma_en4", "rdma_en3", None, "rdma_en5"],
    ["rdma_en3", "rdma_en4", "rdma_en5", None],
]
RING_4 = [
    [None, ["rdma_en3", "rdma_en5"], None, ["rdma_en2", "rdma_en4"]],
    [["rdma_en2", "rdma_en4"], None, ["rdma_en3", "rdma_en5"], None],
    [None, ["rdma_en2", "rdma_en4"], None, ["rdma_en3", "rdma_en5"]],
    [["rdma_en3", "rdma_en5"], None, ["rdma_en2", "rdma_en4"], None],
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test an environment without variables of a world."""
    for name in _READ_BY_JACCL:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def init_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the arguments and the environment of each call of `mx.distributed.init`."""
    calls: list[dict[str, Any]] = []

    def init(**arguments: Any) -> FakeGroup:
        seen: dict[str, Any] = {
            name: os.environ[name] for name in _READ_BY_JACCL if name in os.environ
        }
        matrix = json.loads(Path(seen["MLX_IBV_DEVICES"]).read_text())
        calls.append({**seen, "MLX_IBV_DEVICES": matrix, "arguments": arguments})
        return FakeGroup(int(seen["MLX_RANK"]), len(matrix))

    monkeypatch.setattr(mx.distributed, "init", init)
    monkeypatch.setattr(mx.distributed, "is_available", lambda backend: backend == "jaccl")
    return calls


def _join_orders(hostfile: Path, proven: bool, **world: Any) -> list[JoinWorld]:
    """Return the orders that the scheduler sends to each rank for this hostfile."""
    flags = {"world.hostfile": str(hostfile), **{f"world.{k}": v for k, v in world.items()}}
    config = load_config(flags=flags)
    files = read_world_files(config)
    core = SchedulerCore(config, files.jaccl_devices, files.hostfile)
    actions = []
    for rank in range(config.world.size):
        hello = rank_hello(
            rank,
            host=f"mac{rank}",
            device="metal M3 Ultra",
            mlx_version="0.32.4",
            fast_synch="proven" if proven else "unproven",
        )
        actions += core.handle(RankMessageReceived(PeerId(b"rank-%d" % rank), hello), 0.0)
    orders = [
        action.message
        for action in actions
        if isinstance(action, SendToRanks) and isinstance(action.message, JoinWorld)
    ]
    assert [order.rank for order in orders] == list(range(config.world.size))
    return orders


def _hostfile(folder: Path, backend: str, matrix: list[list[Any]]) -> Path:
    """Write a hostfile as `mlx.distributed_config` writes it."""
    hosts = [
        {"ssh": f"mac{rank}", "ips": [f"10.0.0.{rank + 1}"], "rdma": row}
        for rank, row in enumerate(matrix)
    ]
    path = folder / "hosts.json"
    path.write_text(json.dumps({"backend": backend, "envs": [], "hosts": hosts}, indent=4))
    return path


@pytest.mark.parametrize(
    ("backend", "matrix"), [("jaccl", PAIR), ("jaccl", MESH_4), ("jaccl-ring", RING_4)]
)
def test_jaccl_is_initialized_with_devices_coordinator_and_rank_of_join_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    init_calls: list[dict[str, Any]],
    backend: str,
    matrix: list[list[Any]],
) -> None:
    """Each rank initializes jaccl with its rank, the coordinator and the device matrix.

    The worlds are meshes of 2 and 4 Macs, and a ring of 4 with two cables each.
    """
    hostfile = _hostfile(tmp_path, backend, matrix)
    for order in _join_orders(hostfile, proven=False):
        assert order.backend == "jaccl"
        monkeypatch.delenv("MLX_RANK", raising=False)
        # Variables that MLX's launcher left in the shell must not change the world.
        monkeypatch.setenv("JACCL_RANK", "7")
        monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "1")
        with join.world_environment(order, tmp_path):
            world = collectives.init(order.backend, order.rank, order.world_size)
        assert (world.rank, world.world_size) == (order.rank, len(matrix))

    ring = {"MLX_JACCL_RING": "1"} if backend == "jaccl-ring" else {}
    assert init_calls == [
        {
            "MLX_RANK": str(rank),
            "MLX_JACCL_COORDINATOR": "10.0.0.1:32323",
            "MLX_IBV_DEVICES": matrix,
            "arguments": {"strict": True, "backend": "jaccl"},
            **ring,
        }
        for rank in range(len(matrix))
    ]


@pytest.mark.parametrize(
    ("setting", "proven", "is_on"),
    [
        ("auto", False, False),
        ("auto", True, True),
        ("on", False, True),
        ("off", True, False),
    ],
)
def test_fast_synchronization_needs_setting_on_or_auto_with_stored_test_result(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    init_calls: list[dict[str, Any]],
    setting: str,
    proven: bool,
    is_on: bool,
) -> None:
    """All ranks use fast synchronization with `on`, and with `auto` after a stored success; the
    shell's variable has no effect.
    """
    for order in _join_orders(_hostfile(tmp_path, "jaccl", PAIR), proven, metal_fast_synch=setting):
        monkeypatch.delenv("MLX_RANK", raising=False)
        with join.world_environment(order, tmp_path):
            collectives.init(order.backend, order.rank, order.world_size)

    assert [one.get("MLX_METAL_FAST_SYNCH") for one in init_calls] == ["1" if is_on else None] * 2


def test_jaccl_without_rdma_raises_world_lost_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RDMA the rank raises WorldLost with the remedy; the next epoch may use ring."""
    monkeypatch.setattr(mx.distributed, "is_available", lambda _: False)
    with pytest.raises(WorldLost, match="rdma_ctl enable"):
        collectives.init("jaccl", 0, 2)


def test_mlx_without_nccl_raises_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MLX without NCCL raises ConfigError, because a retry cannot help."""
    monkeypatch.setattr(mx.distributed, "is_available", lambda _: False)
    with pytest.raises(ConfigError, match=r"has no nccl: set world\.backend"):
        collectives.init("nccl", 0, 2)


def test_error_number_in_mlx_message_is_replaced_by_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error number in a message of MLX is replaced by its text."""

    def init(**_: Any) -> None:
        raise RuntimeError(f"[ring] Couldn't bind socket (error: {errno.ECONNREFUSED})")

    monkeypatch.setattr(mx.distributed, "init", init)
    with pytest.raises(WorldLost, match=r"Couldn't bind socket \(Connection refused\)\."):
        collectives.init("ring", 0, 2)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (f"[jaccl] Recv failed with errno={errno.ENOENT}",
         "a peer ended while joining, and its own report says why ([jaccl] Recv failed)."),
        (f"[ring] Couldn't connect (error: {errno.ECONNREFUSED})",
         "a peer did not answer while joining ([ring] Couldn't connect (Connection refused))."),
    ],
)  # fmt: skip
def test_end_of_peer_during_init_is_reported_without_stale_error_number(
    monkeypatch: pytest.MonkeyPatch, message: str, sentence: str
) -> None:
    """At the end of a connection MLX prints the error number of an earlier call: the sentence
    says that a peer ended, and its kind tells the scheduler that this is no cause."""

    def init(**_: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(mx.distributed, "is_available", lambda _: True)
    monkeypatch.setattr(mx.distributed, "init", init)
    with pytest.raises(PeerEnded) as caught:
        collectives.init("jaccl", 0, 2)
    assert str(caught.value) == f"Joining the world over jaccl failed: {sentence}"


def test_lack_of_memory_regions_names_limits_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may hold what an RDMA device has; the sentence says so."""

    def init(**_: Any) -> None:
        raise RuntimeError("[jaccl] Register memory region failed")

    monkeypatch.setattr(mx.distributed, "is_available", lambda _: True)
    monkeypatch.setattr(mx.distributed, "init", init)
    with pytest.raises(WorldLost, match=r"10 queue pairs and 100 memory regions.*lockstep doctor"):
        collectives.init("jaccl", 0, 2)
