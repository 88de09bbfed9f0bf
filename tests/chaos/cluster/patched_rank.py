"""The rank worker's program with patched functions, for ranks that compute wrong results."""

import os
from collections.abc import Callable
from typing import Any

from services.rank_worker import main as rank_worker
from shared.configuration.loading import load_config


def patch_rank_worker(patch: Callable[[], None]) -> None:
    """Have a function called when the rank worker of this process has configured MLX."""
    describe = rank_worker._describe_device

    def describe_and_patch() -> Any:
        device = describe()
        patch()
        return device

    rank_worker._describe_device = describe_and_patch


def run_patched_rank(patch: Callable[[], None], config: str, rank: int) -> int:
    """Run a rank worker; return its exit code.

    Args:
        patch: called when the rank worker has configured MLX, which must not be imported before.
        config: path of the configuration file; the environment's settings override it.
        rank: number of the rank.
    """
    patch_rank_worker(patch)
    return rank_worker.run(load_config(config, environment=os.environ), rank)
