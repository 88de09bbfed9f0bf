"""One rank of a real ring that runs tiny models split in every way, as a program.

    python -m tests.multirank.split_rank CASE...

`MLX_RANK` and `MLX_HOSTFILE` say which ring; without them there is one rank. A case is a splitting
and a family, for example "expert:qwen3_moe". Prints one JSON object, by case what came out.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from services.rank_worker.device import blas

blas.preload()

import mlx.core as mx  # noqa: E402
from mlx import nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from services.rank_worker import collectives  # noqa: E402
from services.rank_worker.collectives import Collectives  # noqa: E402
from services.rank_worker.device import ring_sockets  # noqa: E402
from services.rank_worker.execution.warmup import warm_up  # noqa: E402
from services.rank_worker.model.sharding import local_experts  # noqa: E402
from services.rank_worker.model.sharding.apply import apply_split  # noqa: E402
from services.rank_worker.model.unsharded_traits import read_traits  # noqa: E402
from shared.model.sharding.shares import Split  # noqa: E402
from tests.mlx.executor_driver import Driver, admit, chunk, executor_of, make_prompt  # noqa: E402
from tests.mlx.sharding.moe_models import config_of, make  # noqa: E402

CROSSING = ("all_sum", "all_gather", "send", "recv_like", "recv")
MEMORY_BYTES = (4 << 30, 2 << 30, 3 << 30, 3 << 30)
"""What ranks may use: unequal, so that shares of experts and layers are."""

SIZES = {
    "linear_num_key_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "vocab_size": 212,
}
"""Heads and layers that four ranks can share."""


def main(cases: list[str]) -> None:
    """Join the ring, run all cases and print what came out."""
    hostfile = os.environ.get("MLX_HOSTFILE")
    hosts = Path(hostfile).read_text() if hostfile else "[[]]"
    rank, size = int(os.environ.get("MLX_RANK", "0")), len(json.loads(hosts))
    world = collectives.init("ring" if hostfile else "off", rank, size)
    if hostfile and sys.platform == "linux":
        # Ranks that spin while they wait would take the cores from those that compute.
        ring_sockets.make_blocking(hosts)
    # However little there is to compute, prefill takes the way of long prompts.
    local_experts.WAIT_FLOPS["cpu"] = 0.0
    found = {case: _run(world, *case.split(":")) for case in cases}
    world.check()
    sys.stdout.write(json.dumps(found) + "\n")


def _run(world: Collectives, sharding: Any, family: str) -> dict[str, Any]:
    model = make(family, **SIZES)
    memory = MEMORY_BYTES[: world.world_size]
    split = Split(sharding, world.rank, world.world_size, memory)
    traits = read_traits(model)
    words = apply_split(model, config_of(family, **SIZES), split, world)
    driver = Driver(model, row_tokens=256)
    driver.executor = executor_of(
        model,
        rank=world.rank,
        world_size=world.world_size,
        sum_ids=world.sum_ids if world.world_size > 1 else None,
        traits=traits,
    )
    warm_up(driver.executor, 4096)
    crossings = _play(driver)
    return {
        "split": words,
        "tokens": driver.tokens,
        "digests": [digest.hex() for digest in driver.digests],
        "crossings": crossings,
        "layers": sum(layer is not None for layer in model.layers),
        "bytes": _bytes(model),
        "kv_bytes_per_token": driver.executor.kv_bytes_per_token,
        "kv_layout": driver.executor.kv_layout,
    }


def _play(driver: Driver) -> int:
    """Prefill three prompts, one of them in chunks, and decode; count crossings of one decode."""
    prompts = {1: make_prompt(1, 5), 2: make_prompt(2, 19), 3: make_prompt(3, 75)}
    driver.start(1, 0, prompts[1])
    driver.start(2, 1, prompts[2])
    driver.step(
        admitted=[admit(3, 2, prompts[3])], prefill_chunks=[chunk(3, 0, 40, 75)], decodes=[1, 2]
    )
    driver.step(prefill_chunks=[chunk(3, 40, 75, 75)], decodes=[1, 2])
    crossings = Crossings()
    driver.step(decodes=[1, 2, 3])
    crossings.end()
    for _ in range(5):
        driver.step(decodes=[1, 2, 3])
    _refill(driver)
    return crossings.count


def _refill(driver: Driver) -> None:
    """Let sequences leave and others join between them: rows stand in another order than they came.

    Two that join together are short and of nearly one length: where rows are plain they share a
    forward, the longer one first.
    """
    prompts = {4: make_prompt(4, 9), 5: make_prompt(5, 28), 6: make_prompt(6, 30)}
    driver.step(dropped=[1], decodes=[2, 3])
    driver.step(decodes=[3])
    driver.step(admitted=[admit(4, 0, prompts[4])], prefill_chunks=[chunk(4, 0, 9, 9)], decodes=[3])
    for _ in range(3):
        driver.step(decodes=[4, 2, 3])
    driver.step(
        dropped=[2],
        admitted=[admit(5, 1, prompts[5]), admit(6, 3, prompts[6])],
        prefill_chunks=[chunk(5, 0, 28, 28), chunk(6, 0, 30, 30)],
        decodes=[4, 3],
    )
    for _ in range(3):
        driver.step(decodes=[4, 5, 3, 6])
    driver.step(dropped=[4, 5], decodes=[3, 6])
    driver.step(moves=[(6, 0)], decodes=[6, 3])
    for _ in range(3):
        driver.step(decodes=[6, 3])


class Crossings:
    """Counts what a graph sends to other ranks while it is built, until `end`."""

    def __init__(self) -> None:
        self.count = 0
        self._kept = {name: getattr(mx.distributed, name) for name in CROSSING}
        for name, real in self._kept.items():
            setattr(mx.distributed, name, self._counted(real))

    def end(self) -> None:
        """Count no more."""
        for name, real in self._kept.items():
            setattr(mx.distributed, name, real)

    def _counted(self, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return real(*args, **kwargs)

        return call


def _bytes(model: nn.Module) -> int:
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return sum(array.nbytes for array in arrays.values())


if __name__ == "__main__":
    main(sys.argv[1:])
