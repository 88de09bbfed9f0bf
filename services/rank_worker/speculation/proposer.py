"""What proposes drafts on a rank, as the executor sees it: plans alone say when and how many."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import mlx.core as mx

from services.rank_worker.batch.running_batch import RunningSequence
from services.rank_worker.batch.step_parts import Forwards
from services.rank_worker.sampling.drafts import Drafts
from shared.errors import InvariantBroken
from shared.messages import DraftChunk

Share = Callable[[mx.array], mx.array]
"""Makes ids, int32 of any shape, equal on all ranks, inside the graph."""


class RankProposer:
    """Proposes nothing. Those that do keep a row of their own for each row of the model."""

    sees_hidden: ClassVar[bool] = False
    """Whether it wants the hidden states of the model's forwards."""
    reads_chunks: ClassVar[bool] = False
    """Whether plans say what its rows read (`StepPlan.draft_chunks`)."""
    bytes_per_token: int = 0
    """What a token of a row takes more, on this rank."""
    bytes_per_row: int = 0
    """What a row takes more whatever its length."""

    def resize(self, row_count: int, row_tokens: int) -> None:
        """Make room for so many rows of so many tokens."""

    def free(self, sequence: RunningSequence) -> None:
        """Empty the row of a sequence that leaves."""

    def move(self, slot: int, target: int) -> None:
        """Move a row to a free slot."""

    def roll_back(self, sequence: RunningSequence, base: int, length: int) -> None:
        """Take note of what was accepted.

        Args:
            sequence: whose drafts were verified.
            base: tokens that its row held before.
            length: tokens that it holds from here on.
        """

    def read(
        self, chunks: Sequence[DraftChunk], sequences: Sequence[RunningSequence], forwards: Forwards
    ) -> None:
        """Read tokens into rows, and start that.

        Raises:
            InvariantBroken: a chunk does not go on where its row ends.
        """
        del sequences, forwards
        if chunks:
            raise InvariantBroken(
                f"the plan has {len(chunks)} draft chunks, but no draft model reads them here"
            )

    def prefilled(
        self,
        chunks: Sequence[tuple[RunningSequence, int, int]],
        hidden: mx.array | None,
        forwards: Forwards,
    ) -> None:
        """Take in what a prefill of the model has computed.

        Args:
            chunks: (sequence, start, stop) of each row.
            hidden: [rows, count, dim] if `sees_hidden`; rows may be padded on the right.
            forwards: where to put what is started by itself.
        """

    def propose(
        self,
        sequences: Sequence[RunningSequence],
        lengths: Sequence[int],
        counts: Sequence[int],
        forwards: Forwards,
    ) -> Drafts:
        """Build the proposals of a step.

        Args:
            sequences: those that decode, in slot order.
            lengths: tokens in the row of each.
            counts: of each how many drafts; 0: its row only follows; -1: not even that.
            forwards: where to put what the draw starts too.

        Returns:
            Drafts that are equal on all ranks, as many as asked for.

        Raises:
            InvariantBroken: nothing proposes here, or a row stands elsewhere.
        """
        del lengths, forwards
        raise InvariantBroken(
            f"the plan asks for {max(counts)} drafts of sequence {sequences[0].sequence_id} and "
            "others, but nothing proposes any here"
        )

    def decoded(
        self, sequences: Sequence[RunningSequence], rows: Sequence[int], hidden: mx.array | None
    ) -> None:
        """Take in what a decode of the model has computed.

        Args:
            sequences: those that it decodes.
            rows: of each, which row of `hidden`.
            hidden: [any, count, dim] if `sees_hidden`.
        """
