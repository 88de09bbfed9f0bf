"""The environment of a rank, compared with MLX's own launcher."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.world.environment import rank_environment
from shared.errors import ConfigError

NAMES = (
    "MLX_RANK",
    "MLX_HOSTFILE",
    "MLX_WORLD_SIZE",
    "MLX_IBV_DEVICES",
    "MLX_JACCL_COORDINATOR",
    "MLX_JACCL_RING",
    "MLX_METAL_FAST_SYNCH",
    "NCCL_HOST_IP",
    "NCCL_PORT",
    "CUDA_VISIBLE_DEVICES",
    "MLX_MAX_OPS_PER_BUFFER",
)
SCRIPT = """
import json, os, pathlib, sys
found = {name: os.environ[name] for name in NAMES if name in os.environ}
for name in ("MLX_HOSTFILE", "MLX_IBV_DEVICES"):
    if name in found:
        found[name] = json.loads(pathlib.Path(found[name]).read_text())
        pathlib.Path(os.environ[name]).unlink()
sys.stdout.write(json.dumps(found) + "\\n")
"""


def _launch(tmp_path: Path, *flags: str) -> list[dict[str, Any]]:
    """Run MLX's launcher on this machine; return each rank's variables, by rank."""
    script = tmp_path / "show.py"
    script.write_text(f"NAMES = {NAMES!r}\n{SCRIPT}")
    launcher = "from mlx._distributed_utils.launch import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", launcher, *flags, "--", sys.executable, str(script)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda item: int(item["MLX_RANK"]))


def _ours(*arguments: Any, **more: Any) -> dict[str, Any]:
    """Return variables and parsed files of our function in one dictionary."""
    environment, files = rank_environment(*arguments, **more)
    return {**environment, **{name: json.loads(text) for name, text in files.items()}}


def test_ring_environment_equals_that_of_mlx_launch(tmp_path: Path) -> None:
    """Rank and hostfile equal the launcher's for the same addresses."""
    reference = _launch(tmp_path, "-n", "2", "--backend", "ring", "--starting-port", "41234")

    addresses = ["127.0.0.1:41234", "127.0.0.1:41235"]
    assert reference == [_ours("ring", rank, 2, addresses) for rank in range(2)]


def test_nccl_environment_equals_that_of_mlx_launch(tmp_path: Path) -> None:
    """Rank 0's address, the world size and each rank's own GPU equal the launcher's."""
    reference = _launch(tmp_path, "-n", "3", "--backend", "nccl", "--nccl-port", "41250")

    addresses = ["127.0.0.1:41250", "127.0.0.1:41251", "127.0.0.1:41252"]
    assert reference == [_ours("nccl", rank, 3, addresses) for rank in range(3)]


def test_jaccl_environment_equals_that_of_mlx_launch(tmp_path: Path) -> None:
    """Coordinator and device matrix equal the launcher's."""
    matrix = [[None, "rdma_en5"], ["rdma_en4", None]]
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"], "rdma": row} for row in matrix]
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps(hosts))
    reference = _launch(
        tmp_path, "--hostfile", str(hostfile), "--backend", "jaccl", "--starting-port", "41260"
    )

    text = json.dumps(matrix)
    assert reference == [_ours("jaccl", rank, 2, [], text, "127.0.0.1:41260") for rank in range(2)]


_MESH_4 = [
    [None, "rdma_en5", "rdma_en4", "rdma_en3"],
    ["rdma_en5", None, "rdma_en3", "rdma_en4"],
    ["rdma_en4", "rdma_en3", None, "rdma_en5"],
    ["rdma_en3", "rdma_en4", "rdma_en5", None],
]
_RING_4 = [
    [None, ["rdma_en3", "rdma_en5"], None, ["rdma_en2", "rdma_en4"]],
    [["rdma_en2", "rdma_en4"], None, ["rdma_en3", "rdma_en5"], None],
    [None, ["rdma_en2", "rdma_en4"], None, ["rdma_en3", "rdma_en5"]],
    [["rdma_en3", "rdma_en5"], None, ["rdma_en2", "rdma_en4"], None],
]


@pytest.mark.parametrize(
    ("backend", "matrix"),
    [
        ("jaccl", [[None, ["rdma_en5", "rdma_en4"]], [["rdma_en4", "rdma_en5"], None]]),
        ("jaccl", _MESH_4),
        ("jaccl-ring", _RING_4),
        ("jaccl-ring", _MESH_4),
    ],
)
def test_environment_from_jaccl_hostfile_equals_that_of_mlx_launch(
    tmp_path: Path, backend: str, matrix: list[list[Any]]
) -> None:
    """The same file leads to the same variables and the same matrix on every rank."""
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"], "rdma": row} for row in matrix]
    tree = {"backend": backend, "envs": ["MLX_MAX_OPS_PER_BUFFER=4"], "hosts": hosts}
    text = json.dumps(tree)
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(text)
    reference = _launch(tmp_path, "--hostfile", str(hostfile))

    size = len(matrix)
    ours = [_ours("jaccl", rank, size, [], hostfile_text=text) for rank in range(size)]
    assert reference == ours
    assert all(("MLX_JACCL_RING" in found) == (backend == "jaccl-ring") for found in ours)


@pytest.mark.parametrize("ips", [1, 2])
def test_environment_from_ring_hostfile_equals_that_of_mlx_launch(tmp_path: Path, ips: int) -> None:
    """Ports are counted as the launcher counts them; addresses that ranks report do not matter."""
    text = json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"] * ips} for _ in range(3)])
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(text)
    reference = _launch(tmp_path, "--hostfile", str(hostfile), "--backend", "ring")

    reported = ["", "10.0.0.9:1", ""]
    assert reference == [_ours("ring", rank, 3, reported, hostfile_text=text) for rank in range(3)]


def test_environment_from_nccl_hostfile_equals_that_of_mlx_launch(tmp_path: Path) -> None:
    """Rank 0's address with NCCL's port, and a GPU for each rank of a machine, equal the
    launcher's."""
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]} for _ in range(2)]
    text = json.dumps({"backend": "nccl", "envs": [], "hosts": hosts})
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(text)
    reference = _launch(tmp_path, "--hostfile", str(hostfile), "--repeat-hosts", "2")

    assert reference == [_ours("nccl", rank, 2, [], hostfile_text=text) for rank in range(2)]


def test_ring_hostfile_is_passed_to_mlx_unchanged() -> None:
    """Ports and multiple connections of MLX's own format stay as in the file."""
    rows = [["10.0.0.1:5000", "10.0.1.1:5001"], ["10.0.0.2:5000", "10.0.1.2:5001"]]

    found = _ours("ring", 1, 2, [], hostfile_text=json.dumps(rows))

    assert found == {"MLX_RANK": "1", "MLX_HOSTFILE": rows}


def test_ring_fallback_uses_rank_addresses_when_hostfile_has_none() -> None:
    """When a hostfile for jaccl lacks addresses, ring uses the addresses that ranks report."""
    hosts = [
        {"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None, "x"]},
        {"ssh": "b", "rdma": ["x", None]},
    ]
    reported = ["10.0.0.1:7000", "10.0.0.2:7001"]

    found = _ours("ring", 0, 2, reported, hostfile_text=json.dumps(hosts), machines=["a", "b"])

    assert found["MLX_HOSTFILE"] == [["10.0.0.1:7000"], ["10.0.0.2:7001"]]


def test_configured_device_matrix_and_coordinator_override_hostfile() -> None:
    """A configured matrix and coordinator replace those of the hostfile."""
    hosts = [
        {"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None, "x"]},
        {"ssh": "b", "ips": [], "rdma": ["x", None]},
    ]
    text = json.dumps(hosts)
    matrix = [[None, "rdma_en5"], ["rdma_en4", None]]

    found = _ours("jaccl", 1, 2, [], json.dumps(matrix), "10.9.9.9:5", hostfile_text=text)

    assert found["MLX_IBV_DEVICES"] == matrix
    assert found["MLX_JACCL_COORDINATOR"] == "10.9.9.9:5"


@pytest.mark.parametrize("backend", ["jaccl", "ring", "nccl"])
@pytest.mark.parametrize("fast_synch", [False, True])
def test_fast_synchronization_variable_in_hostfile_has_no_effect(
    backend: str, fast_synch: bool
) -> None:
    """A hostfile that sets the variable does not enable fast synchronization."""
    hosts = [
        {"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None, "x"]},
        {"ssh": "b", "ips": ["10.0.0.2"], "rdma": ["x", None]},
    ]
    text = json.dumps({"envs": ["MLX_METAL_FAST_SYNCH=1", "NCCL_DEBUG=INFO"], "hosts": hosts})

    found = _ours(backend, 0, 2, [], hostfile_text=text, fast_synch=fast_synch)

    assert ("MLX_METAL_FAST_SYNCH" in found) == (fast_synch and backend == "jaccl")
    assert found["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize("backend", ["ring", "nccl"])
def test_loopback_address_is_refused_for_ranks_on_several_machines(backend: Any) -> None:
    """Loopback works on one machine and is refused with the rank's name on two."""
    reported = ["10.0.0.1:7000", "127.0.0.1:7001"]

    assert _ours(backend, 0, 2, reported, machines=["mac", "mac"])
    with pytest.raises(ConfigError, match=r"rank 1 on b reports 127\.0\.0\.1.*data_host.*hostfile"):
        rank_environment(backend, 0, 2, reported, machines=["a", "b"])


def test_join_order_for_single_rank_sets_no_environment_variable() -> None:
    """Without collectives no variable is set."""
    assert rank_environment("off", 0, 1, ["127.0.0.1:1"]) == ({}, {})


def test_first_rank_of_each_host_gets_first_gpu_of_host() -> None:
    """The third rank is the first one on its host, so it gets that host's first GPU."""
    addresses = ["10.0.0.1:7000", "10.0.0.1:7001", "10.0.0.2:7000"]
    devices = [
        rank_environment("nccl", rank, 3, addresses)[0]["CUDA_VISIBLE_DEVICES"] for rank in range(3)
    ]
    assert devices == ["0", "1", "0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ring", 0, 2, ["127.0.0.1:1"]), "2 ranks need as many data addresses"),
        (("ring", 0, 2, ["127.0.0.1:1", ""]), "another launcher"),
        (("jaccl", 0, 2, [], "{"), "not valid JSON"),
        (("jaccl", 0, 2, [], "[[null]]"), "2 rows of 2"),
        (("jaccl", 0, 2, [], '[["a", "b"], ["c", null]]'), "rank 0 to itself"),
    ],
)
def test_invalid_addresses_and_device_matrices_are_refused(
    arguments: tuple[Any, ...], words: str
) -> None:
    """Missing addresses and wrong matrices are refused before any rank starts."""
    with pytest.raises(ConfigError, match=words):
        rank_environment(*arguments)
