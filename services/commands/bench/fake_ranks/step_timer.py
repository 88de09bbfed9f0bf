"""Timed decode steps of one executor. Owns their times, their operations and the bytes they move.

Steps are timed in two ways. Alone: the host waits for each step before it builds the next one, so
the times of its parts are known. Ahead: as in the rank worker's step loop, one step is built while
the device computes another.
"""

import dataclasses

from services.commands.bench.fake_ranks.plan_runs import (
    run_one_by_one,
    run_prepared,
    run_queued,
)
from services.commands.bench.fake_ranks.row_filler import RowFiller
from services.rank_worker.batch.step_outputs import LaunchedStep
from services.rank_worker.execution.executor import Executor
from services.rank_worker.profiling.part_timer import count_primitives
from services.rank_worker.profiling.step_profiler import measure_bytes_per_s
from shared.clock import Clock
from shared.errors import UsageError
from shared.measurements.step_losses import READING_PARTS

WARM_STEPS = 2
"""Steps before those that are timed, of each kind."""
_OTHER_STEPS = 3
"""Further decodes: one whose operations are counted, one whose bytes are counted, and one that ends
where the first timed step ahead begins."""


def rows_growth(steps: int) -> int:
    """Return the number of decodes of one measurement, given its number of timed steps."""
    return 2 * (WARM_STEPS + steps) + _OTHER_STEPS


@dataclasses.dataclass(frozen=True, slots=True)
class StepTimer:
    """Measures the decodes of one executor."""

    executor: Executor
    rows: RowFiller
    """Fills the executor's rows."""
    layers: int
    """Layers of the model."""
    has_queue: bool
    """Whether the device accepts a step while it computes another one."""
    clock: Clock
    """Measures times."""

    def measure(self, batch: int, context: int, steps: int, drafts: int = 0) -> dict[str, float]:
        """Fill the rows and return the metrics of their decodes.

        Args:
            batch: number of rows.
            context: tokens of the longest row; the shortest has 0.6 times as many.
            steps: timed steps, alone and ahead each.
            drafts: of each row, which each step verifies and the next one rejects.

        Returns:
            See `services.commands.bench.parts.step`.

        Raises:
            UsageError: there cannot be such rows, or drafts.
        """
        if drafts and not self.executor.store.can_roll_back:
            raise UsageError(
                "Drafts cannot be verified: this model's rows cannot be shortened, so set --drafts "
                "to 0."
            )
        self.rows.fill(batch, context, rows_growth(steps) + drafts)
        nodes = self._count_nodes(drafts)
        found = self._time_alone(steps, drafts) | {"step_ms": self._time_ahead(steps, drafts)}
        weights_bytes, kv_bytes = self._count_bytes(batch, drafts)
        bytes_per_s = measure_bytes_per_s(self.clock)
        limit_ms = (weights_bytes + kv_bytes) / bytes_per_s * 1e3
        return {
            "nodes": float(nodes),
            "nodes_per_layer": nodes / self.layers,
            **found,
            "weights_mib": weights_bytes / 2**20,
            "kv_mib": kv_bytes / 2**20,
            "moved_mib": (weights_bytes + kv_bytes) / 2**20,
            "device_gb_per_s": bytes_per_s / 1e9,
            "limit_ms": limit_ms,
            "step_per_limit": found["step_ms"] / limit_ms,
        }

    def _prepare(self, drafts: int = 0) -> LaunchedStep:
        return self.executor.prepare(self.rows.plan_decodes(drafts))

    def _count_nodes(self, drafts: int) -> int:
        """Return the number of operations that a step hands to the device."""
        launched = self._prepare(drafts)
        sample = launched.sample
        arrays = [] if sample is None else sample.arrays()
        nodes = count_primitives(
            [*arrays, *launched.markers, *launched.states, *launched.expert_counts]
        )
        del arrays, sample
        self.executor.start(launched)
        self.executor.finish(launched)
        return nodes

    def _time_alone(self, steps: int, drafts: int) -> dict[str, float]:
        """Return the milliseconds of a step for which the host waits: the one of median length."""
        times_s = []
        for _ in range(WARM_STEPS + steps):
            began_s = self.clock.now()
            launched = self._prepare(drafts)
            built_s = self.clock.now()
            self.executor.start(launched)
            started_s = self.clock.now()
            self.executor.finish(launched)
            ended_s = self.clock.now()
            parts_s = (built_s - began_s, started_s - built_s, ended_s - built_s)
            times_s.append((ended_s - began_s, *parts_s))
        median = sorted(times_s[WARM_STEPS:])[steps // 2]
        names = ("alone_ms", "build_ms", "encode_ms", "device_ms")
        return {name: one * 1e3 for name, one in zip(names, median, strict=True)}

    def _time_ahead(self, steps: int, drafts: int) -> float:
        """Return the milliseconds from the end of a step to the end of the next, on average."""
        ends_s: list[float] = []
        plans = (self.rows.plan_decodes(drafts) for _ in range(WARM_STEPS + steps + 1))
        # With drafts a plan says how many of those before it are accepted.
        ahead = run_queued if self.has_queue else run_prepared
        run = run_one_by_one if drafts else ahead
        run(self.executor, plans, lambda: ends_s.append(self.clock.now()))
        return (ends_s[-1] - ends_s[WARM_STEPS]) / steps * 1e3

    def _count_bytes(self, batch: int, drafts: int) -> tuple[int, int]:
        """Return the bytes of weights, and of KV and other state, that one step moves.

        Of routed experts those count that the step's tokens chose. Keys and values are read once
        and those of new tokens are written; recurrent state is read and written.
        """
        plan = self.rows.plan_decodes(drafts, profile="primitives")
        launched = self.executor.launch(plan)
        self.executor.finish(launched)
        profile = launched.profile
        assert profile is not None
        weights = sum(part.bytes for part in profile.parts if part.part in READING_PARTS)
        store = self.executor.store
        written = (1 + drafts) * store.bytes_per_token + 2 * store.bytes_per_row
        return weights, profile.kv_bytes + batch * written
