"""Rows of KV for timed decodes. Owns the sequences of one executor, and the ids of its plans.

Everything happens by step plans, as if a scheduler had sent them. Where rows can be rebuilt from
blocks, one block is computed and every row repeats it, because the speed of a decode does not
depend on the values of keys; elsewhere each prompt is computed.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from services.commands.bench.measuring.row_lengths import uneven_lengths
from services.rank_worker.execution.executor import Executor
from services.scheduler.cache.kv_rows import RowBudget, Rows
from shared import limits
from shared.configuration.settings import SchedulerConfig
from shared.errors import UsageError
from shared.messages import (
    AdmittedSequence,
    KeptBlock,
    PrefillChunk,
    RolledBack,
    Sampling,
    StepPlan,
)

BLOCK_TOKENS = 256
"""Tokens of the block that is computed."""
_GREEDY = Sampling(seed=1, temperature=0.0)


class RowFiller:
    """Fills the rows of an executor that receives no other plans."""

    def __init__(
        self,
        executor: Executor,
        scheduler: SchedulerConfig,
        tokens_max: int,
        kv_budget_bytes: Callable[[], int],
    ) -> None:
        """Begin without sequences.

        Args:
            executor: its next plan is the first of its epoch.
            scheduler: says how many rows there may be, and how their room grows.
            tokens_max: longest sequence in tokens.
            kv_budget_bytes: returns the bytes that rows and blocks may use now.
        """
        self.sequences: list[int] = []
        """The sequences in the rows, in slot order."""
        self._executor = executor
        self._new_rows = functools.partial(
            Rows, scheduler.running_sequences_max, scheduler.kv_row_growth_tokens
        )
        self._tokens_max = tokens_max
        self._kv_budget_bytes = kv_budget_bytes
        self._step_ids, self._sequence_ids = itertools.count(1), itertools.count(1)
        self._shape = (0, 0)
        self._unverified = 0
        """Drafts at the end of each row, which the next plan rejects."""
        self._block: KeptBlock | None = None
        """A resident block, of which all rows consist."""

    def plan(self, **fields: Any) -> StepPlan:
        """Return the next plan, with these fields and the present shape of the rows."""
        row_count, row_tokens = self._shape
        return StepPlan(
            epoch=1,
            step_id=next(self._step_ids),
            deadline_s=0.0,
            row_count=row_count,
            row_tokens=row_tokens,
            **fields,
        )

    def plan_decodes(self, drafts: int = 0, **fields: Any) -> StepPlan:
        """Return the next plan, in which each row decodes a token and verifies drafts.

        None of the drafts of the plan before is accepted.

        Args:
            drafts: of each row.
            fields: further ones of the plan.
        """
        if self._unverified:
            fields["rolled_back"] = [
                RolledBack(
                    sequence_id=one, length=self._executor.store.length(slot) - self._unverified
                )
                for slot, one in enumerate(self.sequences)
            ]
        self._unverified = drafts
        if drafts:
            # Different ones, as they choose different experts.
            vocabulary = self._executor.vocab_size
            fields["drafts"] = [
                [(31 * one + 7 * place + 1) % vocabulary for place in range(drafts)]
                for one in self.sequences
            ]
        return self.plan(decodes=self.sequences, **fields)

    def fill(self, batch: int, context: int, growth: int) -> None:
        """Replace all sequences by new ones of uneven lengths.

        Args:
            batch: number of sequences.
            context: tokens of the longest one.
            growth: decodes of each sequence for which there must be room.

        Raises:
            UsageError: the rows are longer than the model allows, are too short to be uneven, or do
                not fit in memory.
        """
        lengths = uneven_lengths(batch, context)
        self._have_block()
        self._renew_rows(batch, context + growth)
        for slot, length in enumerate(lengths):
            self.sequences.append(self._admit(slot, length))

    def begin_prompts(self, cached: Sequence[int], lengths: Sequence[int]) -> list[PrefillChunk]:
        """Replace all sequences by new ones; return the chunks that are left of their prompts.

        Args:
            cached: tokens of each prompt that its row has already, 0 or more.
            lengths: further tokens of each prompt.

        Raises:
            UsageError: as `fill` does.
        """
        both = list(zip(cached, lengths, strict=True))
        self._have_block()
        self._renew_rows(len(both), max(begin + length for begin, length in both))
        for slot, (begin, length) in enumerate(both):
            self.sequences.append(self._admit(slot, begin, length))
        return [
            PrefillChunk(sequence_id=one, start=begin, length=length, samples=True)
            for one, (begin, length) in zip(self.sequences, both, strict=True)
        ]

    def admit_texts(self, texts: Sequence[Sequence[int]], growth: int, sampling: Sampling) -> None:
        """Replace all sequences by new ones with these prompts, of which nothing is computed yet.

        Args:
            texts: token ids of each prompt, in slot order.
            growth: decodes of each sequence for which there must be room.
            sampling: of each sequence.

        Raises:
            UsageError: the rows are longer than the model allows, or do not fit in memory.
        """
        self._renew_rows(len(texts), max(map(len, texts)) + growth)
        self.sequences = [next(self._sequence_ids) for _ in texts]
        admitted = [
            AdmittedSequence(
                sequence_id=one,
                slot=slot,
                tokens=list(text),
                prompt_tokens=len(text),
                sampling=sampling,
            )
            for slot, (one, text) in enumerate(zip(self.sequences, texts, strict=True))
        ]
        self._run(admitted=admitted)

    def _renew_rows(self, batch: int, tokens: int) -> None:
        """Drop all sequences and give the rows room for new ones, each of `tokens`."""
        if tokens > self._tokens_max:
            raise UsageError(
                f"Rows would grow to {tokens} tokens, and the model's sequences have "
                f"{self._tokens_max} at most."
            )
        self._drop()
        self._shape = self._find_shape(batch, tokens)

    def _run(self, **fields: Any) -> None:
        self._executor.finish(self._executor.launch(self.plan(**fields)))

    def _drop(self) -> None:
        self._shape = (0, 0)
        self._run(dropped=self.sequences)
        self.sequences, self._unverified = [], 0

    def _have_block(self) -> None:
        """Keep a block, of which rows will consist, where rows can be rebuilt from blocks."""
        store = self._executor.store
        if self._block is None and store.layout is not None and not store.needs_state:
            self._drop()
            self._block = self._keep_block(min(BLOCK_TOKENS, self._tokens_max))

    def _keep_block(self, tokens: int) -> KeptBlock:
        """Compute a prompt and keep it as a resident block."""
        self._shape = (1, tokens)
        sequence_id = self._admit(0, tokens)
        block = KeptBlock(sequence_id=sequence_id, start=0, length=tokens, hash=bytes(32))
        self._shape = (0, 0)
        self._run(keep_blocks=[block], dropped=[sequence_id])
        return block

    def _find_shape(self, batch: int, tokens: int) -> tuple[int, int]:
        """Return the shape that the scheduler would choose for rows of this length."""
        store = self._executor.store
        rows = self._new_rows()
        budget = RowBudget(
            self._kv_budget_bytes(), store.bytes_per_token, self._executor.kv_bytes_per_row
        )
        rows.start(budget)
        if not rows.resize(slots=batch, tokens=tokens):
            needed = budget.row_bytes(batch, tokens)
            raise UsageError(
                f"{batch} rows of {tokens} tokens need {needed / 2**30:.1f} GiB, and KV may use "
                f"{budget.bytes_max / 2**30:.1f}."
            )
        return rows.row_count, rows.row_tokens

    def _admit(self, slot: int, length: int, unread: int = 0) -> int:
        """Admit a sequence and compute its prompt, or its end after blocks; return its id.

        The last `unread` tokens of the prompt, which come after `length` others, are left.
        """
        sequence_id = next(self._sequence_ids)
        vocabulary = self._executor.vocab_size
        whole = length + unread
        tokens = [(7 * place + 1) % vocabulary for place in range(whole)]
        # Rows that begin alike still end with different tokens.
        tokens[-1] = (31 * sequence_id) % vocabulary
        block = self._block
        # A row samples from the last token of its prompt, which is therefore computed.
        begin = min(length, whole - 1) if block is not None else 0
        blocks = [] if block is None else [block.hash] * -(-begin // block.length)
        admitted = AdmittedSequence(
            sequence_id=sequence_id,
            slot=slot,
            tokens=tokens,
            prompt_tokens=whole,
            sampling=_GREEDY,
            reused_tokens=begin,
            reused_blocks=blocks,
        )
        self._run(admitted=[admitted])
        for start in range(begin, length, limits.FORWARD_TOKENS_MAX):
            stop = min(length, start + limits.FORWARD_TOKENS_MAX)
            chunk = PrefillChunk(
                sequence_id=sequence_id, start=start, length=stop - start, samples=stop == whole
            )
            self._run(prefill_chunks=[chunk])
        return sequence_id
