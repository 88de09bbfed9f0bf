"""Drafts of a smaller model of the same tokenizer, which every rank runs whole.

Its rows hold the same tokens as the model's own: what is verified, cut back and moved there is cut
back and moved here. So k drafts take k + 1 forwards: the last only reads the last draft.
"""

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx
import numpy as np
from mlx import nn

from services.rank_worker.batch.prefill_groups import group_chunks
from services.rank_worker.batch.running_batch import RunningSequence, last_tokens
from services.rank_worker.batch.step_parts import Forwards
from services.rank_worker.kv_cache.rows import open_store
from services.rank_worker.kv_cache.rows.shapes import read_shape
from services.rank_worker.model.forward import Forward
from services.rank_worker.sampling import Sampler
from services.rank_worker.sampling.drafts import Drafts
from services.rank_worker.speculation.places import Places, to_input
from services.rank_worker.speculation.proposer import RankProposer, Share
from shared.errors import ConfigError, InvariantBroken
from shared.messages import DraftChunk, PrefillChunk


class DraftModel(RankProposer):
    """See `RankProposer`."""

    reads_chunks: ClassVar[bool] = True

    def __init__(self, model: nn.Module, sampler: Sampler, share: Share) -> None:
        """Read the model's shape; nothing is computed.

        Args:
            model: loaded, whole.
            sampler: the one that draws what the drafts are compared with.
            share: makes drafts equal on all ranks.

        Raises:
            ConfigError: its rows cannot be cut back.
        """
        model.eval()
        shape = read_shape(model)
        self._store = open_store(model, shape)
        if not self._store.can_roll_back:
            raise ConfigError(
                f"speculation.draft_model: mlx-lm's {type(model).__module__} keeps state that "
                "cannot be cut back when drafts are rejected: choose another draft model."
            )
        self._forward = Forward(model)
        self._vocab_size = shape.vocab_size
        self._sampler = sampler
        self._share = share
        self.bytes_per_token = self._store.bytes_per_token

    def length(self, slot: int) -> int:
        """Return how many tokens a row holds."""
        return self._store.length(slot)

    def resize(self, row_count: int, row_tokens: int) -> None:
        """Make room for so many rows of so many tokens."""
        self._store.resize(row_count, row_tokens)

    def free(self, sequence: RunningSequence) -> None:
        """Empty the row of a sequence that leaves."""
        self._store.free(sequence.slot)

    def move(self, slot: int, target: int) -> None:
        """Move a row to a free slot."""
        self._store.move(slot, target)

    def roll_back(self, sequence: RunningSequence, base: int, length: int) -> None:
        """Cut a row to what was accepted, if it has followed at all."""
        del base
        if self._store.length(sequence.slot) > length:
            self._store.roll_back(sequence.slot, length)

    def read(
        self, chunks: Sequence[DraftChunk], sequences: Sequence[RunningSequence], forwards: Forwards
    ) -> None:
        """Read tokens into rows, texts that begin and have nearly one length by one forward.

        Each forward is started at once, as prefill is.
        """
        # By their place in the plan: a sequence that has two chunks reads them in order.
        shapes = [
            PrefillChunk(sequence_id=place, start=one.start, length=len(one.tokens), samples=True)
            for place, one in enumerate(chunks)
        ]
        once = len({chunk.sequence_id for chunk in chunks}) == len(chunks)
        for group in group_chunks(shapes) if once else [[one] for one in shapes]:
            places = [one.sequence_id for one in group]
            slots = [sequences[place].slot for place in places]
            lengths = [one.length for one in group]
            padded = np.zeros((len(group), max(lengths)), dtype=np.int32)
            for line, place, slot in zip(padded, places, slots, strict=True):
                chunk = chunks[place]
                self._check(chunk, slot)
                line[: len(chunk.tokens)] = chunk.tokens
            if len(group) == 1:
                caches = self._store.prefill(slots[0], lengths[0])
            else:
                caches = self._store.prefill_together(slots, lengths)
            self._forward.fill(self._known(mx.array(padded)), caches)
            forwards.mark(self._store.marker())

    def _check(self, chunk: DraftChunk, slot: int) -> None:
        length = self._store.length(slot)
        if chunk.start != length:
            raise InvariantBroken(
                f"draft chunk of {len(chunk.tokens)} tokens from {chunk.start} on of sequence "
                f"{chunk.sequence_id}: its draft row holds {length}"
            )

    def propose(
        self,
        sequences: Sequence[RunningSequence],
        lengths: Sequence[int],
        counts: Sequence[int],
        forwards: Forwards,
    ) -> Drafts:
        """Build one forward per place over the rows that have come so far; see `RankProposer`."""
        for sequence, length, count in zip(sequences, lengths, counts, strict=True):
            held = self._store.length(sequence.slot)
            if count >= 0 and held != length:
                raise InvariantBroken(
                    f"sequence {sequence.sequence_id} of {length} tokens is to get {count} drafts, "
                    f"but its draft row holds {held} tokens"
                )
        if max(counts) < 0:
            return Drafts({}, [])
        places = Places(sequences, lengths, counts)
        for place in range(max(counts) + 1):
            rows = [row for row, count in enumerate(counts) if count >= place]
            slots = [sequences[row].slot for row in rows]
            view = self._store.decode(slots, 1)
            if place == 0:
                tokens = last_tokens([sequences[row] for row in rows], view.input_slots)
            else:
                # Rows that come this far are those that drew at the place before.
                tokens = to_input(places.last, slots, view.input_slots)
            drawing = places.drawing()
            tokens = self._known(tokens[:, None])
            if not drawing:
                self._forward.fill(tokens, view.caches)
                break
            numbers = {slot: number for number, slot in enumerate(view.input_slots)}
            wanted = [numbers[sequences[row].slot] for row in drawing]
            every = len(wanted) == len(view.input_slots)
            logits = self._forward.some_logits(tokens, view.caches, None if every else wanted)
            places.draw(logits, self._sampler)
        forwards.follow(self._store.marker())
        return places.drafts(self._share)

    def _known(self, tokens: mx.array) -> mx.array:
        """Return tokens that this model knows too: its vocabulary may have less padding."""
        return mx.minimum(tokens, self._vocab_size - 1)
