"""Check that MLX starts here, computes, and supports the backend.

MLX runs in a child process, because JACCL can crash a process on a host without RDMA (mlx#3777).
"""

import json
import sys

from services.commands.doctor.facts import Findings
from services.commands.doctor.system_commands import CommandOutcome, RunCommand

DEADLINE_S = 60.0

_PROGRAM = """
import json, sys
import mlx.core as mx
sides = mx.ones((64, 64)) @ mx.ones((64, 64))
right = bool(mx.all(sides == 64.0).item())
names = ("ring", "jaccl", "nccl")
has = {name: mx.distributed.is_available(name) for name in names}
print(json.dumps({"right": right, "device": str(mx.default_device()), "has": has}))
"""


def run_mlx_probe(run: RunCommand) -> CommandOutcome:
    """Start MLX in a child process, which multiplies two small matrices and prints JSON.

    The JSON says whether the product is right, the device, and which backends MLX has.
    """
    return run([sys.executable, "-c", _PROGRAM], DEADLINE_S)


def check_device(found: Findings, said: CommandOutcome, backend: str) -> None:
    """Check that MLX started, computed a right product, and has the configured backend.

    Args:
        found: collects the findings; a check that does not hold is a FAIL.
        said: outcome of `run_mlx_probe`.
        backend: the configured backend; "off" for one rank, which needs none.
    """
    last = said.text.strip().rpartition("\n")[2]
    try:
        facts = json.loads(last) if said.ok else {}
    except (ValueError, RecursionError):
        facts = {}
    if not isinstance(facts, dict) or "right" not in facts:
        found.fail(
            "MLX",
            f"MLX does not start: {said.why}",
            "run `python -c 'import mlx.core as mx; print(mx.ones(2) * 2)'` here; if that fails, "
            "install it again with `pip install --force-reinstall mlx`",
        )
        return
    if facts["right"] is not True:
        found.fail(
            "MLX",
            "a small product has a wrong result",
            "restart this host, and do not serve from it if this stays",
        )
        return
    found.ok("MLX", f"starts and computes on {facts.get('device')}")
    has = facts.get("has")
    if backend == "off" or not isinstance(has, dict):
        return
    if has.get(backend):
        found.ok("backend", f"MLX has {backend}")
    else:
        there = ", ".join(name for name, is_there in has.items() if is_there) or "none"
        found.fail(
            "backend",
            f"MLX has no {backend} here, only {there}",
            "jaccl needs macOS 26.2, nccl needs `pip install '.[cuda13]'` in the checkout; or set "
            'world.backend = "ring"',
        )
