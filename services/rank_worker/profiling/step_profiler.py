"""Profiler of steps. Measures part by part the steps whose plans say so, the same on all ranks."""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx import nn

from services.rank_worker.kv_cache.rows.interface import KVStore
from services.rank_worker.profiling.boundaries import ModelParts
from services.rank_worker.profiling.part_timer import PartTimer
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter
from shared.clock import Clock, SystemClock
from shared.messages import StepPlan
from shared.messages.telemetry.step_profile import Part, StepProfile

_CHANGED_BYTES = {mx.cpu: 64 * 1024 * 1024, mx.gpu: 256 * 1024 * 1024}
"""Size of the array that is changed to measure what the device can move; larger than its caches."""
_CHANGES = 5
_CHANGES_AT_ONCE = {mx.cpu: 1, mx.gpu: 8}
"""Changes in one evaluation. One takes a GPU 0.2 ms, and to start an evaluation a part of that."""


class StepParts:
    """Parts of a step that is not measured: nothing is timed, and nothing waits."""

    is_measured = False
    profile: StepProfile | None = None
    """Of a measured step, once it has ended."""

    def part(self, _part: Part) -> contextlib.AbstractContextManager[None]:
        """Return a context whose time counts to a part."""
        return contextlib.nullcontext()

    def wait(self, *values: Any) -> None:
        """Wait for arrays where the step is measured."""


class _MeasuredParts(StepParts):
    is_measured = True

    def __init__(self, timer: PartTimer) -> None:
        self.timer = timer

    def part(self, part: Part) -> contextlib.AbstractContextManager[None]:
        return self.timer.part(part)

    def wait(self, *values: Any) -> None:
        self.timer.wait(*values)


_NOT_MEASURED = StepParts()


class StepProfiler:
    """Measures the steps whose plans say so."""

    def __init__(
        self,
        model: nn.Module,
        drafter: LoadedDrafter | None,
        store: KVStore,
        rank: int,
        sum_ids: Callable[[mx.array], mx.array] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare; the modules are searched when the first step is measured.

        Args:
            model: this rank's shard.
            drafter: its calls are one part; None: the ranks propose no drafts.
            store: the rows, whose lengths say what attention reads.
            rank: this rank.
            sum_ids: sums an int32 array over all ranks; None with one rank.
            clock: measures times.
        """
        self._sum_ids = sum_ids
        self._rank = rank
        self._model = model
        self._draft_model = drafter.model if drafter is not None else None
        self._store = store
        self._clock = clock or SystemClock()
        self._parts: ModelParts | None = None
        self._bytes_per_s = 0.0

    @contextlib.contextmanager
    def step(self, plan: StepPlan) -> Iterator[StepParts]:
        """Yield the parts of a step that is executed within the block.

        All earlier steps must have ended if the plan is to be measured. The profile is complete
        after the block.
        """
        if not plan.profile:
            yield _NOT_MEASURED
            return
        if self._parts is None:
            self._parts = ModelParts(self._model, self._draft_model)
        if plan.profile == "primitives" and not self._bytes_per_s:
            self._bytes_per_s = measure_bytes_per_s(self._clock)
        if self._sum_ids is not None:
            # Ranks begin together, so that one waits for another only because of a part.
            mx.eval(self._sum_ids(mx.zeros((1,), dtype=mx.int32)))
        timer = PartTimer(self._clock, counts_primitives=plan.profile == "primitives")
        measured = _MeasuredParts(timer)
        with self._parts.timed(timer):
            yield measured
        tokens = sum(self._store.length(slot) for slot in range(plan.row_count))
        kv_bytes = tokens * self._store.bytes_per_token
        measured.profile = timer.finish(self._rank, plan.step_id, kv_bytes, self._bytes_per_s)


def measure_bytes_per_s(clock: Clock) -> float:
    """Measure how many bytes the device reads and writes in a second, by changing a large array.

    The array is changed in place, because memory may be short.
    """
    device = mx.default_device().type
    count, at_once = _CHANGED_BYTES[device] // mx.float32.size, _CHANGES_AT_ONCE[device]
    array = mx.zeros((count,), dtype=mx.float32)
    mx.eval(array)
    seconds = []
    for _ in range(_CHANGES):
        began_s = clock.now()
        for _ in range(at_once):
            array = array + 1.0
        mx.eval(array)
        seconds.append((clock.now() - began_s) / at_once)
    return 2 * array.nbytes / statistics.median(seconds)
