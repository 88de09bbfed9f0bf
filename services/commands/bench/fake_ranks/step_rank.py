"""A rank of `lockstep bench step`, `prefill` and `accuracy`: loads a share and runs steps.

    python -m services.commands.bench.fake_ranks.step_rank MODEL BACKEND

The settings are those of the environment (LOCKSTEP_SECTION_KEY). The first JSON line on standard
output describes the rank, or is {"refused": sentence}. Each JSON line on standard input is an
order,

    {"batch": 16, "context": 1024, "steps": 32, "drafts": 0}
    {"prompts": 16, "tokens": 512, "cached": 1024, "rounds": 3}
    {"texts": [[token ids of a prompt], ...], "new_tokens": 32}

of decodes, prompts or continuations, and is answered by their metrics or by the continuations, or
by {"refused": sentence}.
"""

import gc
import os
import sys
from collections.abc import Mapping
from typing import Any, cast

import msgspec

# Imported before MLX, because it chooses the matrix library.
from services.commands.bench.fake_ranks import standalone_rank

# isort: split
from services.commands.bench.fake_ranks.continuations import TextContinuer
from services.commands.bench.fake_ranks.prompt_timer import PromptTimer
from services.commands.bench.fake_ranks.row_filler import RowFiller
from services.commands.bench.fake_ranks.step_timer import StepTimer
from services.commands.bench.measuring.orders import answer_orders, refusals_written, write_answer
from services.rank_worker.batch.decode_groups import forward_cost_of
from services.rank_worker.device import cores, hardware
from services.rank_worker.device.description import Device
from services.rank_worker.device.execution_profile import execution_profile
from services.rank_worker.execution.executor import Executor
from services.rank_worker.execution.warmup import warm_up
from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.model.fast_path.opening import fast_path_settings
from services.rank_worker.model.loading.loader import LoadedModel
from services.rank_worker.peers.collectives import Collectives
from services.rank_worker.worker import KV_MEMORY_SHARE
from services.scheduler.batch.chunk_grid import FIXED_CELL
from shared import limits
from shared.clock import SystemClock
from shared.configuration.loading import load_config
from shared.configuration.settings import Config
from shared.errors import UsageError
from shared.messages.rank_link import Backend
from shared.os import lifeline


def main(path: str, backend: Backend) -> None:
    """Load this rank's share of the model, describe this rank and answer orders.

    Args:
        path: the model's folder.
        backend: of the collectives; "off" for one rank.
    """
    lifeline.exit_with_parent()
    config = load_config(environment=os.environ)
    device = hardware.describe_device()
    place, count = int(os.environ["MLX_RANK"]), int(os.environ["RANKS"])
    cores.pin(config.rank_worker.pin_cores, on_cpu=device.kind == "cpu", place=place, count=count)
    hardware.wire_memory(device)
    model = msgspec.structs.replace(config.model, path=path)
    with refusals_written():
        world = standalone_rank.join(backend)
        loaded = standalone_rank.load(world, model, config.sharding, config.vocabulary_split)
        executor = _build_executor(config, device, loaded, world, backend)
        warm_up(executor, loaded.context_tokens_max)

    def kv_budget_bytes() -> int:
        free_bytes = hardware.free_bytes(device, 1, config.rank_worker.memory_share)
        own = config.rank_worker.kv_bytes_max or int(KV_MEMORY_SHARE * free_bytes)
        # All ranks must refuse the same rows.
        return min(row[0] for row in world.gather([own >> 20])) << 20

    rows = RowFiller(executor, config.scheduler, loaded.context_tokens_max, kv_budget_bytes)
    whole_model: Any = loaded.model
    layers = len(whole_model.layers)
    has_queue = device.kind != "cpu"
    step_timer = StepTimer(executor, rows, layers, has_queue, SystemClock())
    step_tokens_max = config.scheduler.step_tokens_max
    prompt_timer = PromptTimer(executor, rows, step_tokens_max, has_queue, SystemClock())
    chunk_tokens = FIXED_CELL if config.rank_worker.batch_invariant else limits.FORWARD_TOKENS_MAX
    continuer = TextContinuer(executor, rows, chunk_tokens, step_tokens_max)
    gc.collect()
    gc.freeze()

    def answer(**order: Any) -> Mapping[str, Any]:
        try:
            if "texts" in order:
                return continuer.write(**order)
            return (prompt_timer if "prompts" in order else step_timer).measure(**order)
        except UsageError as error:
            return {"refused": str(error)}

    write_answer(
        {
            "device": device.name,
            "kind": device.kind,
            "layers": layers,
            "layers_state": executor.layers_state,
            "weights_mib": loaded.shard_bytes / 2**20,
        }
    )
    answer_orders(answer)


def _build_executor(
    config: Config, device: Device, loaded: LoadedModel, world: Collectives, backend: Backend
) -> Executor:
    """Return the executor that a rank worker builds."""
    every_steps = config.scheduler.experts_every_steps
    counter = None
    if every_steps:
        counter = ExpertCounter(loaded.model, world.rank, config.sharding, every_steps)
    return Executor(
        loaded.model,
        rank=world.rank,
        world_size=world.world_size,
        synchronization=config.world.synchronization,
        receipt_logits=False,
        sum_ids=world.sum_ids if world.group is not None else None,
        forward_cost_tokens=forward_cost_of(backend, on_cpu=device.kind == "cpu"),
        kv_bits=config.rank_worker.kv_bits,
        profile=execution_profile(
            device,
            backend,
            hardware.free_bytes(device, 1),
            batch_invariant=config.rank_worker.batch_invariant,
        ),
        traits=loaded.traits,
        expert_counter=counter if counter is not None and counter.has_layers else None,
        fast_path=fast_path_settings(config.rank_worker, device.kind, backend, world),
        vocabulary=loaded.vocabulary,
    )


if __name__ == "__main__":
    main(sys.argv[1], cast(Backend, sys.argv[2]))
