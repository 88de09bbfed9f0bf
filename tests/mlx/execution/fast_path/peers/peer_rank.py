"""A program: one rank of a ring whose kernels run on the CPU and sum in memory of all ranks.

    python -m tests.mlx.execution.fast_path.peers.peer_rank FOLDER DRIVER CASE

`MLX_RANK` and `MLX_HOSTFILE` define the ring. FOLDER keeps compiled kernels, DRIVER is
`driver_on_cpu.c` compiled. CASE is "sums", "faults", or a setting that is on or off, a kind of
split and a model family, such as "peer_memory:tensor:qwen3_moe". Prints one JSON object.
"""

import dataclasses
import functools
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from services.rank_worker.device import ring_sockets
from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.model.fast_path.kernels import peer_sums, tensor_cores
from services.rank_worker.model.fast_path.kernels.attention import head_kernels
from services.rank_worker.model.fast_path.kernels.peer_sums import SUMMED_ROWS_MAX, open_peer_sums
from services.rank_worker.model.fast_path.opening import FastPathSettings
from services.rank_worker.model.sharding.apply import apply_split
from services.rank_worker.model.sharding.local_experts import keep_all
from services.rank_worker.model.unsharded_traits import read_traits
from services.rank_worker.peers import collectives
from services.rank_worker.peers.collectives import Collectives
from services.rank_worker.peers.peer_memory import OpenPeerMemory, open_peer_memory
from shared.model.sharding.shares import Split
from tests.mlx.execution.fast_path.kernels.metal_kernels import KernelOnCpu
from tests.mlx.executor_driver import (
    ExecutorDriver,
    admission,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.sharding.moe_models import make_moe_model, moe_config
from tests.multirank.worlds.split_rank import CollectiveCounter

FAULTS = ("cuInit", "cuIpcOpenMemHandle_v2", "other_memory", "cuMemsetD8_v2", "no_stores")
"""Of `driver_on_cpu.c`."""
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "num_local_experts": 8}


def main(folder: str, driver: str, case: str) -> None:
    """Join the ring, run the case and print its result."""
    rank, hosts = int(os.environ["MLX_RANK"]), Path(os.environ["MLX_HOSTFILE"]).read_text()
    size = len(json.loads(hosts))
    KernelOnCpu.folder = Path(folder) / str(rank)
    KernelOnCpu.folder.mkdir(exist_ok=True)
    mx.fast.cuda_kernel = KernelOnCpu  # type: ignore[assignment]
    mx.compile = lambda function, **_named: function
    for module in (head_kernels, tensor_cores):
        module.DTYPES = (mx.float32,)  # type: ignore[attr-defined]
    world = collectives.init("ring", rank, size)
    ring_sockets.make_blocking(hosts)
    open_memory = functools.partial(open_peer_memory, world, library=driver)
    if case == "sums":
        found = _add_up(world, open_memory)
    elif case == "faults":
        found = {fault: _fail(world, open_memory, fault) for fault in FAULTS}
    else:
        setting, sharding, family = case.split(":")
        off = {
            "peer_memory": FastPathSettings(open_memory=None),
            "prompts_in_place": FastPathSettings(open_memory=open_memory),
        }[setting]
        on = FastPathSettings(open_memory=open_memory, prompts_in_place=setting != "peer_memory")
        found = {
            name: _run(world, settings, sharding, family)
            for name, settings in (("with", on), ("without", off))
        }
    world.check()
    sys.stdout.write(json.dumps(found) + "\n")


def _fail(world: Collectives, open_memory: OpenPeerMemory, fault: str) -> str:
    """Return why there are no sums if a call of the driver of rank 1 has a fault."""
    os.environ["FAULT"] = fault if world.rank == 1 else ""
    # A poll gives up a turn of the CPU here.
    peer_sums.TRIED_POLLS = 1_000
    sums, why = open_peer_sums(open_memory, world.all_agree, world.world_size, 36, mx.float32)
    assert sums is None
    return why


def _add_up(world: Collectives, open_memory: OpenPeerMemory) -> dict[str, Any]:
    """Add up rows of several numbers, in turn; return the largest difference and the bits."""
    dim, epsilon = 36, mx.array([1e-6])
    sums, fault = open_peer_sums(open_memory, world.all_agree, world.world_size, dim, mx.float32)
    assert sums is not None, fault
    difference, bits = 0.0, []
    weight = mx.random.normal((dim,), key=mx.random.key(1))
    for number, rows in enumerate((1, 5, 2, SUMMED_ROWS_MAX, 1, 1, 3)):
        hidden = mx.random.normal((rows, dim), key=mx.random.key(number))
        own = mx.random.normal((rows, dim), key=mx.random.key(100 * number + world.rank))
        added, normalized = sums.add_norm(hidden, own, weight, epsilon)
        expected = hidden + world.sum_over_ranks(own)
        both = [added - expected, normalized - mx.fast.rms_norm(expected, weight, 1e-6)]
        difference = max(difference, *(float(mx.abs(one).max()) for one in both))
        bits.append(hashlib.sha256(np.array(normalized).tobytes()).hexdigest())
    return {"difference": difference, "bits": bits}


def _run(
    world: Collectives, settings: FastPathSettings, sharding: str, family: str
) -> dict[str, Any]:
    """Decode three sequences; return their tokens and the collectives of a decode.

    Two prompts are computed at once, one of them in two chunks.
    """
    model = make_moe_model(family, **SIZES)
    traits = read_traits(model)
    split: Any = Split(sharding, world.rank, world.world_size)  # type: ignore[arg-type]
    apply_split(model, moe_config(family, **SIZES), split, world)
    keep_all(model)
    driver = ExecutorDriver(model, row_count=3, row_tokens=64)
    driver.executor = make_executor(
        model,
        rank=world.rank,
        world_size=world.world_size,
        sum_ids=world.sum_ids,
        traits=traits,
        profile=ExecutionProfile(has_queue=True, pads_prefill=True),
        fast_path=dataclasses.replace(
            settings, device="cuda", all_agree=world.all_agree, ranks=world.world_size
        ),
    )
    driver.start(1, 0, make_prompt(1, 9))
    driver.step(
        admitted=[admission(2, 1, make_prompt(2, 5)), admission(3, 2, make_prompt(3, 21))],
        prefill_chunks=[prefill_chunk(2, 0, 5, 5), prefill_chunk(3, 0, 13, 21)],
        decodes=[1],
    )
    driver.step(prefill_chunks=[prefill_chunk(3, 13, 21, 21)], decodes=[1, 2])
    counter = CollectiveCounter()
    driver.step(decodes=[1, 2, 3])
    counter.stop()
    for _ in range(3):
        driver.step(decodes=[1, 2, 3])
    driver.step(decodes=[1, 2, 3], drafts=[[5], [], [7, 8]])
    driver.step(dropped=[1], decodes=[2])
    return {
        "state": driver.executor.layers_state,
        "collectives": counter.count,
        "tokens": driver.tokens,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
