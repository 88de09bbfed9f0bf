"""Timed prompts of one executor: those of a step together, and each in a step of its own."""

import dataclasses
import statistics
from collections.abc import Sequence

from services.commands.bench.fake_ranks.plan_runs import (
    divide_chunks,
    run_one_by_one,
    run_queued,
)
from services.commands.bench.fake_ranks.row_filler import RowFiller
from services.commands.bench.measuring.row_lengths import uneven_lengths
from services.rank_worker.execution.executor import Executor
from shared.clock import Clock


@dataclasses.dataclass(frozen=True, slots=True)
class PromptTimer:
    """Measures the prompts of one executor."""

    executor: Executor
    rows: RowFiller
    """Fills the executor's rows."""
    step_tokens_max: int
    """Most prompt tokens of a step, as `scheduler.step_tokens_max`."""
    has_queue: bool
    """Whether the device accepts a step while it computes another one."""
    clock: Clock
    """Measures times."""

    def measure(self, prompts: int, tokens: int, cached: int, rounds: int) -> dict[str, float]:
        """Return the metrics of prompts that come at once.

        Args:
            prompts: number of prompts.
            tokens: tokens to compute of the longest one, at most `limits.FORWARD_TOKENS_MAX`; the
                shortest has 0.6 times as many.
            cached: tokens before them that are in the rows already, as uneven; 0: none.
            rounds: times that the prompts are computed in each of the two ways.

        Returns:
            See `services.commands.bench.parts.prefill`.

        Raises:
            UsageError: there cannot be such prompts.
        """
        lengths = uneven_lengths(prompts, tokens)
        begins = uneven_lengths(prompts, cached) if cached else [0] * prompts
        together_s, one_by_one_s = [], []
        for _ in range(rounds):
            together_s.append(self._time(begins, lengths, self.step_tokens_max))
            one_by_one_s.append(self._time(begins, lengths, 1))
        together, one_by_one = map(statistics.median, (together_s, one_by_one_s))
        return {
            "together_ms": together * 1e3,
            "one_by_one_ms": one_by_one * 1e3,
            "together_per_one_by_one": together / one_by_one,
            "tokens_per_s": sum(lengths) / together,
        }

    def _time(self, begins: Sequence[int], lengths: Sequence[int], tokens_max: int) -> float:
        """Return the seconds that new prompts take in steps of up to `tokens_max` tokens."""
        chunks = self.rows.begin_prompts(begins, lengths)
        plans = (self.rows.plan(prefill_chunks=one) for one in divide_chunks(chunks, tokens_max))
        # The step loop builds no prompt ahead on a CPU.
        run = run_queued if self.has_queue else run_one_by_one
        began_s = self.clock.now()
        run(self.executor, plans, lambda: None)
        return self.clock.now() - began_s
