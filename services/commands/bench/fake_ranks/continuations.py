"""Continuations of texts by one executor, with the log probability of each token."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from services.commands.bench.fake_ranks.plan_runs import divide_chunks
from services.commands.bench.fake_ranks.row_filler import RowFiller
from services.rank_worker.execution.executor import Executor
from shared.messages import Sampling

_GREEDY = Sampling(seed=1, temperature=0.0, top_logprobs=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Continuations:
    """Continues texts side by side, greedily."""

    executor: Executor
    rows: RowFiller
    """Fills the executor's rows."""
    step_tokens_max: int
    """Most prompt tokens of a step, as `scheduler.step_tokens_max`."""

    def write(self, texts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, list[list[Any]]]:
        """Return the continuations of texts that are in each step together.

        Args:
            texts: token ids of each text, at most `limits.FORWARD_TOKENS_MAX`.
            new_tokens: tokens of each continuation.

        Returns:
            tokens: ids of each continuation; logprobs: the natural-log probability of each.

        Raises:
            UsageError: the rows are longer than the model allows, or do not fit in memory.
        """
        tokens: list[list[int]] = [[] for _ in texts]
        logprobs: list[list[float]] = [[] for _ in texts]

        def run(places: Sequence[int], **fields: Any) -> None:
            plan = self.rows.plan(**fields)
            result = self.executor.finish(self.executor.launch(plan))
            for place, drawn, about in zip(places, result.tokens, result.logprobs, strict=True):
                tokens[place] += drawn
                logprobs[place] += [one.logprob for one in about]

        chunks = self.rows.begin_texts(texts, new_tokens, _GREEDY)
        for step in divide_chunks(chunks, self.step_tokens_max):
            run([self.rows.sequences.index(one.sequence_id) for one in step], prefill_chunks=step)
        for _ in range(new_tokens - 1):
            run(range(len(texts)), decodes=self.rows.sequences)
        return {"tokens": tokens, "logprobs": logprobs}
