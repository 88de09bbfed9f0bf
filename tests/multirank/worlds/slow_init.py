"""Programs for worlds whose ranks are slow or fail inside MLX's init, and for their scheduler.

    python -m tests.multirank.worlds.slow_init rank --rank R --config FILE
    python -m tests.multirank.worlds.slow_init scheduler --config FILE

A rank takes its part from its variable `SLOW_INIT_<rank>`: "seconds", or "seconds message". It
holds the interpreter's lock for that time, as MLX's init does while it waits, and then fails with
the message. The scheduler takes its limit for silence from `SILENCE_S`.
"""

import argparse
import ctypes
import os
import sys
from typing import Any

from services.rank_worker import scheduler_link
from shared import limits
from tests.chaos.cluster.patched_rank import run_patched_rank


def hold_lock(seconds: float) -> None:
    """Sleep without releasing the interpreter's lock: no other thread of the process runs."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def patch_init(rank: int) -> None:
    """Make MLX's init slow, or fail, as the environment says for this rank."""
    text, _, message = os.environ.get(f"SLOW_INIT_{rank}", "0").partition(" ")
    import mlx.core as mx

    init = mx.distributed.init

    def slow_init(**arguments: Any) -> Any:
        hold_lock(float(text))
        if message:
            raise RuntimeError(message)
        return init(**arguments)

    mx.distributed.init = slow_init  # type: ignore[assignment]


def main() -> int:
    """Run a rank worker or a scheduler."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("rank", "scheduler"))
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--config", required=True)
    options = parser.parse_args()
    limits.PEER_SILENCE_S = float(os.environ.get("SILENCE_S", limits.PEER_SILENCE_S))
    if options.role == "scheduler":
        from services.scheduler.main import run
        from shared.configuration.loading import load_config

        return run(load_config(options.config))
    scheduler_link.FLUSH_S = 5.0
    return run_patched_rank(lambda: patch_init(options.rank), options.config, options.rank)


if __name__ == "__main__":
    sys.exit(main())
