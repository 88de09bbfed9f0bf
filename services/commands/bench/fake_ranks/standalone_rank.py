"""Start of a rank without a scheduler: joins a world and loads a shard.

The environment comes from `rank_processes.rank_environments`. Import this module before MLX,
because it chooses the matrix library.
"""

import os
import sys
from pathlib import Path

from services.rank_worker.device import blas

BLAS = blas.preload() if os.environ.get("LOCKSTEP_RANK_WORKER_BLAS", "auto") == "auto" else ""
"""Name of the library for matrix products on a CPU; "" for MLX's own."""

from services.rank_worker.device import hardware, ring_sockets  # noqa: E402
from services.rank_worker.model.loading.loader import LoadedModel, open_model  # noqa: E402
from services.rank_worker.model.loading.memory_fit import (  # noqa: E402
    check_fits,
    rank_memory_bytes,
)
from services.rank_worker.model.loading.source import find_source  # noqa: E402
from services.rank_worker.peers import collectives  # noqa: E402
from services.rank_worker.peers.collectives import Collectives  # noqa: E402
from shared.configuration.settings import ModelConfig  # noqa: E402
from shared.errors import ConfigError  # noqa: E402
from shared.messages.base import Sharding  # noqa: E402
from shared.messages.rank_link import Backend, VocabularySplit  # noqa: E402
from shared.model.sharding.shares import Split  # noqa: E402


def join(backend: Backend) -> Collectives:
    """Join a world of ranks and return the collectives of this rank.

    Rank and world size come from the variables MLX_RANK and RANKS, the addresses from MLX's own.

    Args:
        backend: backend of the collectives; "off" for one rank.
    """
    rank, size = int(os.environ.get("MLX_RANK", "0")), int(os.environ.get("RANKS", "1"))
    world = collectives.init(backend, rank, size)
    if backend == "ring" and sys.platform == "linux" and len(os.sched_getaffinity(0)) < 2 * size:
        ring_sockets.make_blocking(Path(os.environ["MLX_HOSTFILE"]).read_text())
    return world


def load(
    world: Collectives,
    model: ModelConfig,
    sharding: Sharding,
    vocabulary: VocabularySplit = "off",
) -> LoadedModel:
    """Load this rank's share of a model with the rank worker's own loader.

    Args:
        world: the world that the ranks have joined.
        model: the model's folder and data type.
        sharding: how the ranks share the model.
        vocabulary: which matrices with a row per token they divide.

    Raises:
        ConfigError: on all ranks, if the share of one does not fit in its memory. What other
            processes use of it is not counted.
    """
    source = find_source(model, world.world_size, sharding)
    split = Split(sharding, world.rank, world.world_size, vocabulary=vocabulary)
    opened = open_model(model, source, split, world, lambda *_: None)
    memory_bytes = rank_memory_bytes(hardware.describe_device(), world.world_size)
    obstacle = None
    try:
        check_fits(opened.needs, opened.context_tokens_max, memory_bytes)
    except ConfigError as error:
        obstacle = error
    if not world.all_agree(obstacle is None):
        raise obstacle or ConfigError("Another rank's share of the model does not fit.")
    return opened.read(lambda *_: None)
