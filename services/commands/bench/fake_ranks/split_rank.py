"""One rank of `lockstep bench splits`: joins the world, loads its shard and measures steps.

    python -m services.commands.bench.fake_ranks.split_rank BACKEND MODEL SHARDING

The first JSON line on standard output describes the rank. Each JSON line on standard input is an
order, such as

    {"phase": "decode", "batch": 8, "steps": 16}     {"phase": "prefill", "tokens": 256}

and is answered by the milliseconds of one step and of its parts (see `_measure`).
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Imported before MLX, because it chooses the matrix library.
from services.commands.bench.fake_ranks import standalone_rank

# isort: split
import mlx.core as mx

from services.commands.bench.measuring.orders import answer_orders, refusals_written, write_answer
from services.rank_worker.batch.step_outputs import LaunchedStep
from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.device.hardware import device_kind
from services.rank_worker.execution.executor import Executor
from services.rank_worker.execution.warmup import warm_up
from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.peers.collectives import Collectives
from shared.configuration.settings import ModelConfig
from shared.messages import AdmittedSequence, PrefillChunk, Sampling, StepPlan
from shared.messages.base import Sharding
from shared.messages.rank_link import Backend
from shared.os import lifeline

PROMPT_TOKENS = 64
"""Prompt tokens of each row that decodes."""
REPLAYS = 20
PREFILLS = 3
"""Prefills per measurement; their median counts."""
WARM_STEPS = 2
_NEVER = 2**62

CollectiveCall = tuple[str, tuple[int, ...], mx.Dtype, int]
"""Function, shape and dtype of a collective, and the peer's rank of a send or receive."""


def main(backend: Backend, model: str, sharding: Sharding) -> None:
    """Join the world that the environment describes, load the model and answer orders.

    Args:
        backend: backend of the collectives; "off" for one rank.
        model: the model's folder.
        sharding: how the ranks share the model.
    """
    lifeline.exit_with_parent()
    with refusals_written():
        timer = _StepTimer(standalone_rank.join(backend), model, sharding)
    write_answer(timer.describe())
    answer_orders(timer.measure)


class _StepTimer:
    """A rank's executor and its timed steps."""

    def __init__(self, world: Collectives, path: str, sharding: Sharding) -> None:
        self._world = world
        loaded = standalone_rank.load(world, ModelConfig(path=path), sharding)
        self._shard_bytes = loaded.shard_bytes
        self._counter = ExpertCounter(loaded.model, world.rank, sharding, _NEVER)
        self._executor = Executor(
            loaded.model,
            rank=world.rank,
            world_size=world.world_size,
            synchronization="broadcast",
            receipt_logits=False,
            sum_ids=world.sum_ids if world.world_size > 1 else None,
            profile=ExecutionProfile(has_queue=device_kind() != "cpu", grouped_tokens_max=0),
            traits=loaded.traits,
            expert_counter=self._counter if self._counter.has_layers else None,
        )
        warm_up(self._executor, 4_096)
        self._step_id = 0
        self._rows = (0, 0)
        self._collectives: list[CollectiveCall] = []

    def describe(self) -> dict[str, Any]:
        """Return `weights_mib`, the size of this rank's weights in MiB, and the name `device`."""
        return {"weights_mib": self._shard_bytes / 2**20, "device": str(mx.default_device())}

    def measure(self, phase: str, **order: int) -> dict[str, Any]:
        """Return the result of `decode` or `prefill`, as the order's phase says."""
        return self.decode(**order) if phase == "decode" else self.prefill(**order)

    def decode(self, batch: int, steps: int) -> dict[str, Any]:
        """Return the milliseconds of one decode step and its parts, with the keys of `_measure`.

        Args:
            batch: number of rows, each with a prompt of PROMPT_TOKENS tokens.
            steps: number of timed decode steps, whose mean counts.
        """
        self._rows = (batch, PROMPT_TOKENS + WARM_STEPS + steps + 2)

        def run() -> float:
            sequences = list(range(1, batch + 1))
            for one in sequences:
                self._executor.finish(self._admit(one, PROMPT_TOKENS))
            for _ in range(WARM_STEPS):
                self._executor.finish(self._launch(decodes=sequences))
            began_s = time.perf_counter()
            # One step is launched ahead, as in the rank worker.
            flight = [self._launch(decodes=sequences)]

            def finish_before() -> None:
                self._executor.finish(flight.pop(0))

            for _ in range(steps - 1):
                flight.append(self._launch(finish_before, decodes=sequences))
                if len(flight) > 1:
                    finish_before()
            finish_before()
            took_s = time.perf_counter() - began_s
            self._drop(sequences)
            return took_s * 1e3 / steps

        return self._measure(run)

    def prefill(self, tokens: int) -> dict[str, Any]:
        """Return the milliseconds of one prompt's prefill and its parts, keyed as in `_measure`.

        Args:
            tokens: length of the prompt.
        """
        self._rows = (1, tokens + 1)

        def run() -> float:
            times_s = []
            for _ in range(PREFILLS):
                began_s = time.perf_counter()
                self._executor.finish(self._admit(1, tokens))
                times_s.append(time.perf_counter() - began_s)
                self._drop([1])
            return statistics.median(times_s) * 1e3

        return self._measure(run)

    def _measure(self, run: Callable[[], float]) -> dict[str, Any]:
        """Measure a step, its computation alone and its collectives alone.

        - step: the whole step on all ranks together.
        - compute: the same graphs on this rank alone; every collective returns its argument, so
          that nothing is sent and no peer is waited for.
        - collectives: the same number and sizes of collectives one after the other on all ranks
          together, without computation between them.
        - waiting: the rest of the step, spent on slower peers and on work that cannot overlap.
        - assignments: of the whole step, the tokens routed to this rank's experts and those routed
          to all experts, once for each expert, by layer.

        Args:
            run: runs steps and returns the milliseconds of one.
        """
        before = self._counter.counts
        step_ms = run()
        found: dict[str, Any] = {"step_ms": step_ms, "compute_ms": step_ms, "collectives_ms": 0.0}
        self._counter.read_now()
        own = [sum(one.counts) for one in self._counter.report(before)[0]]
        found["assignments"] = own, (self._counter.counts - before).sum(axis=1).tolist()
        if self._world.world_size > 1:
            with _recorded_collectives() as self._collectives:
                found["compute_ms"] = run()
            found["collectives_ms"] = self._replay()
        parts_ms = found["compute_ms"] + found["collectives_ms"]
        found["waiting_ms"] = max(0.0, step_ms - parts_ms)
        found["collectives"] = float(len(self._collectives))
        return found

    def _replay(self) -> float:
        """Return the milliseconds of a step's collectives without computation."""
        times_s = []
        for _ in range(REPLAYS):
            self._world.check()
            began_s = time.perf_counter()
            mx.eval(_chain(self._collectives))
            times_s.append(time.perf_counter() - began_s)
        return statistics.median(times_s) * 1e3

    def _admit(self, sequence_id: int, tokens: int) -> LaunchedStep:
        vocabulary = self._executor.vocab_size
        prompt = [(7 * place + 31 * sequence_id) % vocabulary for place in range(tokens)]
        new = AdmittedSequence(
            sequence_id=sequence_id,
            slot=sequence_id - 1,
            tokens=prompt,
            prompt_tokens=tokens,
            sampling=Sampling(seed=1, temperature=0.0),
        )
        chunk = PrefillChunk(sequence_id=sequence_id, start=0, length=tokens, samples=True)
        return self._launch(admitted=[new], prefill_chunks=[chunk])

    def _drop(self, sequences: list[int]) -> None:
        rows, self._rows = self._rows, (0, 0)
        self._executor.finish(self._launch(dropped=sequences))
        self._rows = rows

    def _launch(
        self, finish_before: Callable[[], None] | None = None, **fields: Any
    ) -> LaunchedStep:
        self._step_id += 1
        if "dropped" not in fields:
            self._collectives.clear()
        return self._executor.launch(
            StepPlan(
                epoch=1,
                step_id=self._step_id,
                deadline_s=0.0,
                row_count=self._rows[0],
                row_tokens=self._rows[1],
                **fields,
            ),
            finish_before,
        )


@contextmanager
def _recorded_collectives() -> Iterator[list[CollectiveCall]]:
    """Replace collectives by functions that send nothing; yield a list that records the calls."""
    sent: list[CollectiveCall] = []
    names = ("all_sum", "all_gather", "send", "recv_like")
    kept = {name: getattr(mx.distributed, name) for name in names}

    def recorder(name: str) -> Callable[..., mx.array]:
        def call(x: mx.array, peer: int = 0, **_: Any) -> mx.array:
            sent.append((name, tuple(x.shape), x.dtype, peer))
            if name == "all_gather":
                return mx.concatenate([x] * int(os.environ["RANKS"]))
            return x

        return call

    for name in names:
        setattr(mx.distributed, name, recorder(name))
    try:
        yield sent
    finally:
        for name, real in kept.items():
            setattr(mx.distributed, name, real)


def _chain(calls: list[CollectiveCall]) -> mx.array:
    """Return the last array of a graph that runs these collectives one after the other."""
    before = mx.zeros((1,))
    for name, shape, dtype, peer in calls:
        (array,) = mx.depends([mx.zeros(shape, dtype)], [before])
        real = getattr(mx.distributed, name)
        before = real(array) if name.startswith("all_") else real(array, peer)
    return before


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])  # type: ignore[arg-type]
