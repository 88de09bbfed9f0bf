"""Does MLX start here, compute, and have the backend? Asked in a child, which alone may crash.

JACCL has been seen to crash a process that looked for RDMA where there is none (mlx#3777).
"""

import json
import sys

from services.commands.doctor.facts import Findings
from services.commands.doctor.outputs import Output, Run

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


def ask(run: Run) -> Output:
    """Have a process of its own start MLX and compute something small."""
    return run([sys.executable, "-c", _PROGRAM], DEADLINE_S)


def check_device(found: Findings, said: Output, backend: str) -> None:
    """Check what the child has said.

    Args:
        found: takes the findings.
        said: from `ask`.
        backend: the one that the settings ask for; "off" for one rank.
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
        found.fail("MLX", "a small product has a wrong result", "restart this host; use no other")
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
