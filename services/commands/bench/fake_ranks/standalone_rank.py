"""Joining a world and loading a shard with no scheduler near: what benchmarks' ranks begin with.

The environment is that of `rank_children.environments`. Import this before MLX: it chooses the
matrix library.
"""

import os
import sys
from pathlib import Path

from services.rank_worker.device import blas

BLAS = blas.preload()
"""The library that computes matrix products on a CPU; "" is MLX's own."""

from services.rank_worker import collectives  # noqa: E402
from services.rank_worker.collectives import Collectives  # noqa: E402
from services.rank_worker.device import ring_sockets  # noqa: E402
from services.rank_worker.model.loading.loader import (  # noqa: E402
    LoadedModel,
    load_model,
)
from services.rank_worker.model.loading.source import find_source  # noqa: E402
from shared.configuration.settings import ModelConfig  # noqa: E402
from shared.messages.rank_link import Backend, Sharding  # noqa: E402
from shared.model.sharding.shares import Split  # noqa: E402


def join(backend: Backend) -> Collectives:
    """Join the world that the environment describes."""
    rank, size = int(os.environ.get("MLX_RANK", "0")), int(os.environ.get("RANKS", "1"))
    world = collectives.init(backend, rank, size)
    if backend == "ring" and sys.platform == "linux" and len(os.sched_getaffinity(0)) < 2 * size:
        ring_sockets.wait_in_kernel(Path(os.environ["MLX_HOSTFILE"]).read_text())
    return world


def load(world: Collectives, path: str, sharding: Sharding) -> LoadedModel:
    """Read this rank's share of a model folder, as a rank worker does."""
    source = find_source(ModelConfig(path=path), world.world_size, sharding)
    split = Split(sharding, world.rank, world.world_size)
    return load_model(ModelConfig(path=path), source, split, world, lambda *_: None)
