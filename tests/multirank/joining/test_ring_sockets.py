"""Sums over the ring with blocking sockets."""

import json
import subprocess
import sys
from pathlib import Path

from tests.multirank.worlds.scripted_scheduler import two_free_ports

ROOT = Path(__file__).resolve().parents[3]
RANK_SCRIPT = """
import json, os, sys
from pathlib import Path
import mlx.core as mx
from services.rank_worker.peers import collectives
from services.rank_worker.device import ring_sockets
world = collectives.init("ring", int(os.environ["MLX_RANK"]), 2)
changed = ring_sockets.make_blocking(Path(os.environ["MLX_HOSTFILE"]).read_text())
world.check()
right = []
for size in (1, 1_000, 300_001, 6_000_000):
    ids = mx.arange(size, dtype=mx.int32)
    total = world.sum_ids(ids * (world.rank + 1))
    right.append(mx.array_equal(total, ids * 3).item())
sys.stdout.write(json.dumps({"changed": changed, "right": right}) + "\\n")
"""


def test_collective_sums_over_ring_backend_are_correct_with_blocking_sockets() -> None:
    """Sums of 1 to 6,000,000 elements are correct on both ranks."""
    if sys.platform != "linux":
        return
    launcher = "from mlx._distributed_utils.launch import main; main()"
    flags = [
        *("-n", "2", "--backend", "ring", "--starting-port", str(two_free_ports())),
        *("--env", f"PYTHONPATH={ROOT}", "--"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", launcher, *flags, sys.executable, "-c", RANK_SCRIPT],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    assert found == [{"changed": 2, "right": [True] * 4}] * 2
