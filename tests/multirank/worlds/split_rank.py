"""A program: one rank of a real ring that runs tiny models with each kind of split.

    python -m tests.multirank.worlds.split_rank CASE...

`MLX_RANK` and `MLX_HOSTFILE` define the ring; without them there is one rank. A case is a kind of
split and a model family, for example "expert:qwen3_moe". Prints one JSON object: results by case.
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

from services.rank_worker.device import ring_sockets  # noqa: E402
from services.rank_worker.execution.warmup import warm_up  # noqa: E402
from services.rank_worker.model.expert_counter import ExpertCounter  # noqa: E402
from services.rank_worker.model.sharding import local_experts  # noqa: E402
from services.rank_worker.model.sharding.apply import apply_split  # noqa: E402
from services.rank_worker.model.unsharded_traits import read_traits  # noqa: E402
from services.rank_worker.peers import collectives  # noqa: E402
from services.rank_worker.peers.collectives import Collectives  # noqa: E402
from shared.model.sharding.shares import Split  # noqa: E402
from tests.mlx.executor_driver import (  # noqa: E402
    ExecutorDriver,
    admission,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.sharding.moe_models import make_moe_model, moe_config  # noqa: E402

COLLECTIVES = ("all_sum", "all_gather", "send", "recv_like", "recv")
MEMORY_BYTES = (4 << 30, 2 << 30, 3 << 30, 3 << 30)
"""Memory of each rank; unequal, so that shares of experts and layers are unequal too."""

SIZES = {
    "linear_num_key_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "vocab_size": 212,
}
"""Model sizes that four ranks can share."""


def main(cases: list[str]) -> None:
    """Join the ring, run all cases and print the results."""
    hostfile = os.environ.get("MLX_HOSTFILE")
    hosts = Path(hostfile).read_text() if hostfile else "[[]]"
    rank, size = int(os.environ.get("MLX_RANK", "0")), len(json.loads(hosts))
    world = collectives.init("ring" if hostfile else "off", rank, size)
    if hostfile and sys.platform == "linux":
        # Waiting ranks that spin would take the cores from computing ranks.
        ring_sockets.make_blocking(hosts)
    # Prefill of short prompts, too, uses the code for long ones.
    local_experts.WAIT_FLOPS["cpu"] = 0.0
    results = {case: _run(world, *case.split(":")) for case in cases}
    world.check()
    sys.stdout.write(json.dumps(results) + "\n")


def _run(world: Collectives, sharding: Any, family: str) -> dict[str, Any]:
    model = make_moe_model(family, **SIZES)
    memory = MEMORY_BYTES[: world.world_size]
    split = Split(sharding, world.rank, world.world_size, memory)
    traits = read_traits(model)
    description = apply_split(model, moe_config(family, **SIZES), split, world)
    counter = ExpertCounter(model, world.rank, sharding, 1)
    driver = ExecutorDriver(model, row_tokens=256)
    driver.executor = make_executor(
        model,
        rank=world.rank,
        world_size=world.world_size,
        sum_ids=world.sum_ids if world.world_size > 1 else None,
        traits=traits,
        expert_counter=counter,
    )
    warm_up(driver.executor, 4096)
    collectives_per_decode = _run_steps(driver)
    return {
        "split": description,
        "experts": [(one.layer, one.first, one.counts) for one in counter.report()[0]],
        "tokens": driver.tokens,
        "digests": [digest.hex() for digest in driver.digests],
        "collectives_per_decode": collectives_per_decode,
        "layers": sum(layer is not None for layer in model.layers),
        "bytes": _bytes(model),
        "kv_bytes_per_token": driver.executor.store.bytes_per_token,
        "kv_layout": driver.executor.store.layout_text,
    }


def _run_steps(driver: ExecutorDriver) -> int:
    """Prefill three prompts, one of them in chunks, and decode.

    Returns:
        The number of collectives of one decode.
    """
    prompts = {1: make_prompt(1, 5), 2: make_prompt(2, 19), 3: make_prompt(3, 75)}
    driver.start(1, 0, prompts[1])
    driver.start(2, 1, prompts[2])
    driver.step(
        admitted=[admission(3, 2, prompts[3])],
        prefill_chunks=[prefill_chunk(3, 0, 40, 75)],
        decodes=[1, 2],
    )
    driver.step(prefill_chunks=[prefill_chunk(3, 40, 75, 75)], decodes=[1, 2])
    counter = CollectiveCounter()
    driver.step(decodes=[1, 2, 3])
    counter.stop()
    for _ in range(5):
        driver.step(decodes=[1, 2, 3])
    _replace_sequences(driver)
    return counter.count


def _replace_sequences(driver: ExecutorDriver) -> None:
    """Drop sequences and admit others, so that rows are not in the order of admission.

    Two sequences are admitted together and have nearly the same length: with plain rows they share
    a forward pass, the longer one first.
    """
    prompts = {4: make_prompt(4, 9), 5: make_prompt(5, 28), 6: make_prompt(6, 30)}
    driver.step(dropped=[1], decodes=[2, 3])
    driver.step(decodes=[3])
    driver.step(
        admitted=[admission(4, 0, prompts[4])],
        prefill_chunks=[prefill_chunk(4, 0, 9, 9)],
        decodes=[3],
    )
    for _ in range(3):
        driver.step(decodes=[4, 2, 3])
    driver.step(
        dropped=[2],
        admitted=[admission(5, 1, prompts[5]), admission(6, 3, prompts[6])],
        prefill_chunks=[prefill_chunk(5, 0, 28, 28), prefill_chunk(6, 0, 30, 30)],
        decodes=[4, 3],
    )
    for _ in range(3):
        driver.step(decodes=[4, 5, 3, 6])
    driver.step(dropped=[4, 5], decodes=[3, 6])
    driver.step(moves=[(6, 0)], decodes=[6, 3])
    for _ in range(3):
        driver.step(decodes=[6, 3])


class CollectiveCounter:
    """Counts the collectives of the graphs that are built until `stop`."""

    def __init__(self) -> None:
        self.count = 0
        self._originals = {name: getattr(mx.distributed, name) for name in COLLECTIVES}
        for name, original in self._originals.items():
            setattr(mx.distributed, name, self._counted(original))

    def stop(self) -> None:
        """Restore the original functions."""
        for name, original in self._originals.items():
            setattr(mx.distributed, name, original)

    def _counted(self, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        return call


def _bytes(model: nn.Module) -> int:
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return sum(array.nbytes for array in arrays.values())


if __name__ == "__main__":
    main(sys.argv[1:])
