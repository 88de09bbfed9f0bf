"""The environment of a rank is what MLX's own launcher sets; the launcher is the reference."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.environment import world_environment
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
    """Run MLX's launcher on this machine and return what each rank found, by rank."""
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


def _ours(*arguments: Any) -> dict[str, Any]:
    """Return variables and parsed files of our function as one dictionary."""
    environment, files = world_environment(*arguments)
    return {**environment, **{name: json.loads(text) for name, text in files.items()}}


def test_ring_is_as_mlx_launches_it(tmp_path: Path) -> None:
    """Rank and hostfile equal the launcher's for the same addresses."""
    reference = _launch(tmp_path, "-n", "2", "--backend", "ring", "--starting-port", "41234")

    addresses = ["127.0.0.1:41234", "127.0.0.1:41235"]
    assert reference == [_ours("ring", rank, 2, addresses) for rank in range(2)]


def test_nccl_is_as_mlx_launches_it(tmp_path: Path) -> None:
    """Rank 0's address, the world's size and each rank's own GPU equal the launcher's."""
    reference = _launch(tmp_path, "-n", "3", "--backend", "nccl", "--nccl-port", "41250")

    addresses = ["127.0.0.1:41250", "127.0.0.1:41251", "127.0.0.1:41252"]
    assert reference == [_ours("nccl", rank, 3, addresses) for rank in range(3)]


def test_jaccl_is_as_mlx_launches_it(tmp_path: Path) -> None:
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


def test_one_rank_needs_nothing() -> None:
    """Without collectives no variable is set."""
    assert world_environment("off", 0, 1, ["127.0.0.1:1"]) == ({}, {})


def test_gpus_are_counted_per_host() -> None:
    """The third rank is the first one on its host, so it gets that host's first GPU."""
    addresses = ["10.0.0.1:7000", "10.0.0.1:7001", "10.0.0.2:7000"]
    devices = [
        world_environment("nccl", rank, 3, addresses)[0]["CUDA_VISIBLE_DEVICES"]
        for rank in range(3)
    ]
    assert devices == ["0", "1", "0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ring", 0, 2, ["127.0.0.1:1"]), "2 ranks need as many data addresses"),
        (("ring", 0, 2, ["127.0.0.1:1", ""]), "another launcher"),
        (("jaccl", 0, 2, [], "{"), "no JSON"),
        (("jaccl", 0, 2, [], "[[null]]"), "2 rows of 2"),
        (("jaccl", 0, 2, [], '[["a", "b"], ["c", null]]'), "rank 0 to itself"),
    ],
)
def test_what_cannot_work_is_named(arguments: tuple[Any, ...], words: str) -> None:
    """Missing addresses and matrices that do not fit are refused before any rank tries."""
    with pytest.raises(ConfigError, match=words):
        world_environment(*arguments)
