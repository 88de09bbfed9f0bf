"""Process that runs `mlx_lm.generate.BatchGenerator` without a server: the ceiling of `overhead`.

A process of its own, so that it uses the same matrix library as a rank. Each JSON line on standard
input orders one measurement, and one JSON line on standard output reports it. It exits when its
input closes. If several ranks share the model, each is such a process and all receive the same
orders; they stay in step because their work depends only on token counts.

    python -m services.commands.bench.serving.batch_generator BACKEND MODEL_FOLDER SHARDING
"""

import functools
import importlib.metadata
import statistics
import sys
import time
from typing import Any

from services.commands.bench.measuring.numbers import differences, latencies
from services.commands.bench.measuring.orders import answer_orders, write_answer
from shared.configuration.settings import ModelConfig
from shared.messages.base import Sharding
from shared.messages.rank_link import Backend
from shared.os import lifeline


def main(backend: Backend, folder: str, sharding: Sharding) -> None:
    """Join the world, load the model, describe this rank and answer orders with `measure`.

    Args:
        backend: backend of the collectives; "off" for one rank.
        folder: the model's folder.
        sharding: how the ranks share the model.
    """
    lifeline.exit_with_parent()
    from services.commands.bench.fake_ranks import standalone_rank

    library = standalone_rank.BLAS
    import mlx.core as mx

    on_cpu = mx.default_device() == mx.cpu or not (
        mx.metal.is_available() or mx.cuda.is_available()
    )
    world = standalone_rank.join(backend)
    if world.world_size > 1:
        model: Any = standalone_rank.load(world, ModelConfig(path=folder), sharding).model
    else:
        model = _load_whole_model(folder, on_cpu=on_cpu)
    write_answer(
        {
            "device": "cpu" if on_cpu else str(mx.device_info().get("device_name", "gpu")),
            "blas": str(library or "mlx's own") if on_cpu else "",
            "mlx": importlib.metadata.version("mlx"),
            "ranks": world.world_size,
        }
    )
    answer_orders(functools.partial(measure, model))


def _load_whole_model(folder: str, *, on_cpu: bool) -> Any:
    import mlx.core as mx
    from mlx_lm.utils import load

    loaded: Any = load(folder)
    model = loaded[0]
    if on_cpu:
        # Ranks with model.dtype "auto" do the same: bfloat16 matrix products are slow on CPUs.
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    return model


def measure(model: Any, clients: list[list[list[int]]], max_tokens: int) -> dict[str, float]:
    """Generate greedily for clients that each send one prompt after the other.

    Args:
        model: a model of mlx_lm.
        clients: per client its prompts (token ids); each begins when the one before has ended.
        max_tokens: completion length of every prompt.

    Returns:
        The metrics of `services.commands.bench.measuring.numbers.latencies`; tokens (total),
        tokens_per_s, process_cpu_us_per_token (mean); full_batch_step_ms_p50: median time between
        steps in which every client gets a token; absent without two such steps.
    """
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, max_tokens=max_tokens, completion_batch_size=32)
    queues = [list(prompts) for prompts in clients]
    owners: dict[int, int] = {}
    sent_s: dict[int, float] = {}
    arrived_s: dict[int, list[float]] = {}
    steps_s: list[float] = []
    began_s, began_cpu_s = time.perf_counter(), time.process_time()

    def insert(client: int) -> None:
        if queues[client]:
            sent = time.perf_counter()
            (uid,) = generator.insert([queues[client].pop(0)])
            owners[uid], sent_s[uid], arrived_s[uid] = client, sent, []

    for client in range(len(queues)):
        insert(client)
    while any(len(times) < max_tokens for times in arrived_s.values()):
        responses = generator.next()[1]
        now_s = time.perf_counter()
        if len(responses) == len(clients):
            steps_s.append(now_s)
        for response in responses:
            arrived_s[response.uid].append(now_s)
            if response.finish_reason is not None:
                insert(owners[response.uid])
    wall_s = time.perf_counter() - began_s
    cpu_s = time.process_time() - began_cpu_s
    generator.close()
    metrics = latencies([(sent_s[uid], arrived_s[uid]) for uid in arrived_s], wall_s)
    metrics["tokens"] = sum(len(times) for times in arrived_s.values())
    metrics["tokens_per_s"] = metrics["tokens"] / wall_s
    metrics["process_cpu_us_per_token"] = cpu_s * 1e6 / metrics["tokens"]
    if gaps_s := differences(steps_s):
        metrics["full_batch_step_ms_p50"] = statistics.median_high(gaps_s) * 1_000
    return metrics


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])  # type: ignore[arg-type]
