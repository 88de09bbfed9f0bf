"""One rank of `lockstep bench splits`: joins the world, loads its shard, measures what it is told.

    python -m services.commands.bench.fake_ranks.split_rank BACKEND MODEL SHARDING

One JSON line in, one out. The first line out says what the rank holds; then, for every order:

    {"what": "decode", "batch": 8, "steps": 16}     {"what": "prefill", "tokens": 256}

the milliseconds of one step, and of its two parts that can be had alone (see `_measure`).
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from services.commands.bench.fake_ranks import standalone_rank

# isort: split
import mlx.core as mx

from services.rank_worker.collectives import Collectives
from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.device.hardware import device_kind
from services.rank_worker.execution.executor import Executor, LaunchedStep
from services.rank_worker.execution.warmup import warm_up
from shared.messages import AdmittedSequence, PrefillChunk, Sampling, StepPlan
from shared.messages.rank_link import Backend, Sharding
from shared.os import lifeline

PROMPT_TOKENS = 64
"""Of the rows that decode."""
REPLAYS = 20
PREFILLS = 3
"""Prefills of one measurement; the median counts."""
WARM_STEPS = 2

Crossing = tuple[str, tuple[int, ...], mx.Dtype, int]
"""What is sent to other ranks: by which function, its shape and type, and from or to which rank."""


def main(backend: Backend, model: str, sharding: Sharding) -> None:
    """Join the world that the environment describes, load, and answer orders until they end."""
    lifeline.exit_with_parent()
    world = standalone_rank.join(backend)
    bench = _Bench(world, model, sharding)
    _say(bench.about())
    for line in sys.stdin:
        order = json.loads(line)
        if order["what"] == "decode":
            _say(bench.decode(order["batch"], order["steps"]))
        else:
            _say(bench.prefill(order["tokens"]))


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class _Bench:
    def __init__(self, world: Collectives, path: str, sharding: Sharding) -> None:
        self._world = world
        loaded = standalone_rank.load(world, path, sharding)
        self._shard_bytes = loaded.shard_bytes
        self._executor = Executor(
            loaded.model,
            rank=world.rank,
            world_size=world.world_size,
            synchronization="broadcast",
            receipt_logits=False,
            sum_ids=world.sum_ids if world.world_size > 1 else None,
            profile=ExecutionProfile(has_queue=device_kind() != "cpu", groups_prefill=False),
            traits=loaded.traits,
        )
        warm_up(self._executor, 4_096)
        self._step_id = 0
        self._rows = (0, 0)
        self._crossings: list[Crossing] = []

    def about(self) -> dict[str, Any]:
        """Return what this rank holds."""
        return {"weights_mib": self._shard_bytes / 2**20, "device": str(mx.default_device())}

    def decode(self, batch: int, steps: int) -> dict[str, float]:
        """Return milliseconds of one decode of so many rows."""
        self._rows = (batch, PROMPT_TOKENS + WARM_STEPS + steps + 2)

        def whole() -> float:
            sequences = list(range(1, batch + 1))
            for one in sequences:
                self._finish(self._admit(one, PROMPT_TOKENS))
            for _ in range(WARM_STEPS):
                self._finish(self._launch(decodes=sequences))
            began_s = time.perf_counter()
            # One step ahead, as ranks run.
            flight = [self._launch(decodes=sequences)]

            def finish_before() -> None:
                self._finish(flight.pop(0))

            for _ in range(steps - 1):
                flight.append(self._launch(finish_before, decodes=sequences))
                if len(flight) > 1:
                    finish_before()
            finish_before()
            took_s = time.perf_counter() - began_s
            self._drop(sequences)
            return took_s * 1e3 / steps

        return self._measure(whole)

    def prefill(self, tokens: int) -> dict[str, float]:
        """Return milliseconds of the prefill of one prompt."""
        self._rows = (1, tokens + 1)

        def whole() -> float:
            times_s = []
            for _ in range(PREFILLS):
                began_s = time.perf_counter()
                self._finish(self._admit(1, tokens))
                times_s.append(time.perf_counter() - began_s)
                self._drop([1])
            return statistics.median(times_s) * 1e3

        return self._measure(whole)

    def _measure(self, run: Callable[[], float]) -> dict[str, float]:
        """Measure a step, its computation alone and its collectives alone.

        - step: the whole of it, all ranks together.
        - compute: the same graphs on this rank by itself, where every collective gives back what
          it is given: no peer is waited for and nothing is sent.
        - collectives: as many of them, of the same sizes, one behind the other with nothing
          between, all ranks together.
        - waiting: what is left of the step, for slower peers and for what cannot overlap.
        """
        step_ms = run()
        found = {"step_ms": step_ms, "compute_ms": step_ms, "collectives_ms": 0.0}
        if self._world.world_size > 1:
            with _standing_in() as self._crossings:
                found["compute_ms"] = run()
            found["collectives_ms"] = self._replay()
        parts_ms = found["compute_ms"] + found["collectives_ms"]
        found["waiting_ms"] = max(0.0, step_ms - parts_ms)
        found["collectives"] = float(len(self._crossings))
        return found

    def _replay(self) -> float:
        """Return milliseconds that a step's collectives take alone."""
        times_s = []
        for _ in range(REPLAYS):
            self._world.check()
            began_s = time.perf_counter()
            mx.eval(_chain(self._crossings))
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
        self._finish(self._launch(dropped=sequences))
        self._rows = rows

    def _launch(
        self, finish_before: Callable[[], None] | None = None, **fields: Any
    ) -> LaunchedStep:
        self._step_id += 1
        if "dropped" not in fields:
            self._crossings.clear()
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

    def _finish(self, launched: LaunchedStep) -> None:
        self._executor.finish(launched)


@contextmanager
def _standing_in() -> Iterator[list[Crossing]]:
    """Let what goes to other ranks go nowhere; yield what the last graph would have sent."""
    sent: list[Crossing] = []
    names = ("all_sum", "all_gather", "send", "recv_like")
    kept = {name: getattr(mx.distributed, name) for name in names}

    def stand_in(name: str) -> Callable[..., mx.array]:
        def call(x: mx.array, peer: int = 0, **_: Any) -> mx.array:
            sent.append((name, tuple(x.shape), x.dtype, peer))
            if name == "all_gather":
                return mx.concatenate([x] * int(os.environ["RANKS"]))
            return x

        return call

    for name in names:
        setattr(mx.distributed, name, stand_in(name))
    try:
        yield sent
    finally:
        for name, real in kept.items():
            setattr(mx.distributed, name, real)


def _chain(crossings: list[Crossing]) -> mx.array:
    """Return the end of a graph of these collectives, each waiting for the one before."""
    before = mx.zeros((1,))
    for name, shape, dtype, peer in crossings:
        (array,) = mx.depends([mx.zeros(shape, dtype)], [before])
        real = getattr(mx.distributed, name)
        before = real(array) if name.startswith("all_") else real(array, peer)
    return before


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])  # type: ignore[arg-type]
