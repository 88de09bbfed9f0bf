"""Interface of drafters on a rank. Plans alone say when drafts are proposed, and how many."""

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from services.rank_worker.batch.running_batch import RunningSequence
from services.rank_worker.batch.step_outputs import ForwardOutputs
from services.rank_worker.kv_cache.rows.interface import KVStore
from services.rank_worker.sampling.drafts import StepDrafts
from services.rank_worker.sampling.sampler import Sampler, SynchronizeIds
from shared.errors import InvariantBroken
from shared.messages import DraftChunk


class RankProposer:
    """A drafter that proposes nothing, and the base class of all drafters.

    A drafter's forwards report a marker each: a
    small array whose evaluation runs the forward (see `ForwardOutputs`). Shapes of hidden states: B
    rows, L tokens per row, H numbers per token.
    """

    needs_chunks: ClassVar[bool] = False
    """Whether plans must hold the tokens that its rows read (`StepPlan.draft_chunks`)."""
    bytes_per_token: int = 0
    """Additional bytes per token of a row on this rank."""
    bytes_per_row: int = 0
    """Additional bytes per row on this rank that do not depend on its length."""

    def resize(self, row_count: int, row_tokens: int) -> None:
        """Set the number of the drafter's rows and the capacity of each in tokens."""

    def free(self, sequence: RunningSequence) -> None:
        """Empty the drafter's row of a sequence that leaves the batch."""

    def move(self, slot: int, target: int) -> None:
        """Move the drafter's row in `slot` to the free slot `target`."""

    def roll_back(self, sequence: RunningSequence, base_length: int, length: int) -> None:
        """Cut the drafter's row to the drafts that were accepted.

        Args:
            sequence: whose drafts were verified.
            base_length: tokens in the model's row before the step that verified them.
            length: tokens in the model's row after the rollback: `base_length`, 1 and the accepted
                drafts.
        """

    def read(
        self,
        chunks: Sequence[DraftChunk],
        sequences: Sequence[RunningSequence],
        forwards: ForwardOutputs,
    ) -> None:
        """Append known tokens to the drafter's rows and start the forwards.

        Args:
            chunks: `draft_chunks` of the plan: token ids and the position of the first.
            sequences: the sequence of each chunk.
            forwards: gets one marker per forward.

        Raises:
            InvariantBroken: this rank has no draft model, or a chunk does not start where its row
                ends.
        """
        del sequences, forwards
        if chunks:
            raise InvariantBroken(
                f"the plan has {len(chunks)} draft chunks, but this rank has no draft model"
            )

    def on_prefill(
        self,
        chunks: Sequence[tuple[RunningSequence, int, int]],
        hidden: mx.array | None,
        forwards: ForwardOutputs,
    ) -> None:
        """Let the drafter use the hidden states of a prefill; does nothing unless overridden.

        Args:
            chunks: (sequence, index of the chunk's first token, index after its last) of each row.
            hidden: [B, L, H] in the model's dtype; rows may be padded on the right. None unless
                `Forward.keeps_hidden` is set.
            forwards: gets the markers of the drafter's forwards.
        """

    def propose(
        self,
        sequences: Sequence[RunningSequence],
        lengths: Sequence[int],
        counts: Sequence[int],
        forwards: ForwardOutputs,
    ) -> StepDrafts:
        """Build the drafts of a step.

        Args:
            sequences: those that decode, in slot order.
            lengths: tokens in the model's row of each.
            counts: drafts of each; 0: the drafter's row only reads the tokens that it lacks; -1:
                its row is left alone.
            forwards: gets the markers.

        Returns:
            As many drafts as `counts` says, equal on all ranks.

        Raises:
            InvariantBroken: this rank has no drafter, or a row of it has another length.
        """
        del lengths, forwards
        raise InvariantBroken(
            f"the plan asks for {max(counts)} drafts for sequence {sequences[0].sequence_id} and "
            "others, but this rank has no drafter"
        )

    def on_decode(
        self, sequences: Sequence[RunningSequence], starts: Sequence[int], hidden: mx.array | None
    ) -> None:
        """Let the drafter keep the hidden states of a decode; does nothing unless overridden.

        Args:
            sequences: those that the decode computes.
            starts: index of each one's first token among the B * L tokens of `hidden`.
            hidden: [B, L, H] in the model's dtype; None unless `Forward.keeps_hidden` is set.
        """


class DrafterWithRows(RankProposer):
    """Base class of the drafters, which keep a row of their own for each row of the model."""

    def __init__(self, store: KVStore, sampler: Sampler, synchronize: SynchronizeIds) -> None:
        """Start without rows; nothing is computed.

        Args:
            store: KV of the drafter's rows.
            sampler: samples the drafts, and the tokens that they are compared with.
            synchronize: makes drafts equal on all ranks.
        """
        self._store = store
        self._sampler = sampler
        self._synchronize = synchronize
        self.bytes_per_token = store.bytes_per_token

    def resize(self, row_count: int, row_tokens: int) -> None:
        """Set the number of the drafter's rows and the capacity of each in tokens."""
        self._store.resize(row_count, row_tokens)

    def free(self, sequence: RunningSequence) -> None:
        """Empty the drafter's row of a sequence that leaves the batch."""
        self._store.free(sequence.slot)

    def move(self, slot: int, target: int) -> None:
        """Move the drafter's row in `slot` to the free slot `target`."""
        self._store.move(slot, target)

    def _prefill(self, slots: Sequence[int], lengths: Sequence[int]) -> list[Any]:
        """Lengthen rows and return the caches for one forward; several rows must be empty."""
        if len(slots) == 1:
            return self._store.prefill(slots[0], lengths[0])
        return self._store.prefill_padded(slots, lengths)
