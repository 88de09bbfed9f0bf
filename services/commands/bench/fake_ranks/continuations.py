"""Continuations of texts by one executor, with the log probability of each token."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from services.commands.bench.fake_ranks.plan_runs import divide_chunks
from services.commands.bench.fake_ranks.row_filler import RowFiller
from services.rank_worker.execution.executor import Executor
from shared.messages import PrefillChunk, Sampling

_GREEDY = Sampling(seed=1, temperature=0.0, top_logprobs=0)


@dataclasses.dataclass(frozen=True, slots=True)
class TextContinuer:
    """Continues texts side by side, greedily."""

    executor: Executor
    rows: RowFiller
    """Fills the executor's rows."""
    chunk_tokens_max: int
    """Most tokens of a text that a step reads."""
    step_tokens_max: int
    """Most tokens of all texts that a step reads, as `scheduler.step_tokens_max`."""

    def write(self, texts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, list[list[Any]]]:
        """Continue texts; all are read before the first decode, which has a row of each.

        Args:
            texts: token ids of each text.
            new_tokens: tokens of each continuation.

        Returns:
            tokens: ids of each continuation; logprobs: the natural-log probability of each id.

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

        self.rows.admit_texts(texts, new_tokens, _GREEDY)
        for chunks in self._divide(texts):
            ended = [self.rows.sequences.index(one.sequence_id) for one in chunks if one.samples]
            run(ended, prefill_chunks=chunks)
        for _ in range(new_tokens - 1):
            run(range(len(texts)), decodes=self.rows.sequences)
        return {"tokens": tokens, "logprobs": logprobs}

    def _divide(self, texts: Sequence[Sequence[int]]) -> Iterator[list[PrefillChunk]]:
        """Yield the chunks of each step that reads texts."""
        width = self.chunk_tokens_max
        for start in range(0, max(map(len, texts)), width):
            chunks = [
                PrefillChunk(
                    sequence_id=one,
                    start=start,
                    length=min(width, len(text) - start),
                    samples=len(text) <= start + width,
                )
                for one, text in zip(self.rows.sequences, texts, strict=True)
                if start < len(text)
            ]
            yield from divide_chunks(chunks, self.step_tokens_max)
