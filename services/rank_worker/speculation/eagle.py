"""Drafts of a head over the model's hidden states, which every rank runs whole.

A row of the head has one entry per token of the sequence whose hidden state was seen; entries are
made of true hidden states only. What a step drafts beyond them is forgotten with the step, because
its verification shows the true ones: the next forward enters those first, ragged, and then drafts.
What steps without drafts show is kept for a while and entered with the rest. Where hidden states
were not seen (tokens from blocks), or too long ago, the entries are simply missing: positions are
relative, and drafts decide how many tokens a step gives, never which.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx
import numpy as np

from services.rank_worker.batch.running_batch import RunningSequence
from services.rank_worker.batch.step_parts import Forwards
from services.rank_worker.kv_cache.rows.row_store import RowStore
from services.rank_worker.model.forward import Forward
from services.rank_worker.sampling import Sampler
from services.rank_worker.sampling.drafts import Drafts
from services.rank_worker.speculation.eagle_head import EagleHead
from services.rank_worker.speculation.places import Places, to_input
from services.rank_worker.speculation.proposer import RankProposer, Share
from shared import limits
from shared.errors import ConfigError, InvariantBroken

KEPT_MAX = 64
"""Hidden states per sequence that wait to be entered, about: drafts begin again some steps after
they have stopped with all that was seen between."""

PADDING_TOKENS = KEPT_MAX + limits.DRAFT_TOKENS_MAX + 1
"""Columns of a row beyond its tokens: entries of rows that catch up together are padded to the
longest."""


@dataclasses.dataclass(slots=True)
class Seen:
    """Hidden states of one step that a row of the head does not have yet."""

    hidden: mx.array
    """[rows, width, dim]. It is computed on the way to what that step draws."""
    row: int
    count: int = 1
    """The first so many of the row."""
    last: tuple[mx.array, int] | None = None
    """Where the token behind the last of them lies: (ids, index). None: the sequence's last."""


class Eagle(RankProposer):
    """See `RankProposer`."""

    sees_hidden: ClassVar[bool] = True

    def __init__(self, head: EagleHead, forward: Forward, sampler: Sampler, share: Share) -> None:
        """Let the model's forwards show their hidden states; nothing is computed.

        Args:
            head: loaded.
            forward: the model, whose embeddings and head are used.
            sampler: the one that draws what the drafts are compared with.
            share: makes drafts equal on all ranks.

        Raises:
            ConfigError: the model shows no hidden states, or of another width.
        """
        if not (forward.hidden_dim and forward.embeds):
            raise ConfigError(
                "speculation.method: this model's hidden states or embeddings cannot be told "
                "apart from its layers, so that no EAGLE head can use them: choose another method."
            )
        if head.width != forward.hidden_dim:
            raise ConfigError(
                f"speculation.draft_model: the head was made for hidden states of {head.width} "
                f"numbers, this model's have {forward.hidden_dim}: choose its own head."
            )
        head.set_dtype(forward.hidden_dtype)
        head.eval()
        forward.keeps_hidden = True
        self._head = head
        self._forward = forward
        self._sampler = sampler
        self._share = share
        self._store = RowStore(head.layer_shapes())
        self.bytes_per_token = self._store.bytes_per_token
        self.bytes_per_row = PADDING_TOKENS * self.bytes_per_token
        self._seen: dict[int, list[Seen]] = {}
        """By sequence id, in the order of steps."""

    def length(self, slot: int) -> int:
        """Return how many entries a row has."""
        return self._store.length(slot)

    def resize(self, row_count: int, row_tokens: int) -> None:
        """Make room, for padding too."""
        self._store.resize(row_count, row_tokens + PADDING_TOKENS if row_tokens else 0)

    def free(self, sequence: RunningSequence) -> None:
        """Empty the row of a sequence that leaves."""
        self._store.free(sequence.slot)
        self._seen.pop(sequence.sequence_id, None)

    def move(self, slot: int, target: int) -> None:
        """Move a row to a free slot."""
        self._store.move(slot, target)

    def roll_back(self, sequence: RunningSequence, base: int, length: int) -> None:
        """Take note of how many hidden states are those of accepted tokens."""
        self._seen[sequence.sequence_id][-1].count = length - base

    def prefilled(
        self,
        chunks: Sequence[tuple[RunningSequence, int, int]],
        hidden: mx.array | None,
        forwards: Forwards,
    ) -> None:
        """Enter what a prefill has shown, all but what stands before a token still to be drawn."""
        assert hidden is not None
        following = [one.tokens[start + 1 : stop + 1] for one, start, stop in chunks]
        lengths = [len(tokens) for tokens in following]
        slots = [one.slot for one, _, _ in chunks]
        width = max(lengths)
        if width:
            padded = np.zeros((len(chunks), width), dtype=np.int32)
            for line, tokens in zip(padded, following, strict=True):
                line[: len(tokens)] = tokens
            if len(chunks) == 1:
                caches = self._store.prefill(slots[0], width)
            else:
                caches = self._store.prefill_together(slots, lengths)
            self._head(self._forward.embed(mx.array(padded)), hidden[:, :width], caches)
            forwards.mark(self._store.marker())
        ends = mx.array([[stop - start - 1] for _, start, stop in chunks], dtype=mx.int32)
        # Copied out: a view would keep the hidden states of the whole prompt.
        tails = mx.take_along_axis(hidden, ends[:, :, None], axis=1)
        forwards.mark(tails)
        for row, (sequence, _, stop) in enumerate(chunks):
            if stop == len(sequence.tokens):
                self._seen[sequence.sequence_id] = [Seen(tails, row)]

    def propose(
        self,
        sequences: Sequence[RunningSequence],
        lengths: Sequence[int],
        counts: Sequence[int],
        forwards: Forwards,
    ) -> Drafts:
        """Enter what was seen; go on from there on the head's own outputs; see `RankProposer`."""
        places = Places(sequences, lengths, counts)
        following = [row for row, count in enumerate(counts) if count >= 0]
        if not following:
            return places.drafts(self._share)
        outputs = self._catch_up([sequences[row] for row in following])
        held = {sequences[row].slot: self._store.length(sequences[row].slot) for row in following}
        drawing = places.drawing()
        if drawing:
            numbers = {row: number for number, row in enumerate(following)}
            state = outputs[mx.array([numbers[row] for row in drawing], dtype=mx.int32)]
            places.draw(self._logits(state), self._sampler)
        before = drawing
        while drawing := places.drawing():
            slots = [sequences[row].slot for row in drawing]
            view = self._store.decode(slots, 1)
            came = [sequences[row].slot for row in before]
            tokens = to_input(places.last, came, view.input_slots)
            state = to_input(state, came, view.input_slots)
            outputs = self._head(self._forward.embed(tokens[:, None]), state[:, None], view.caches)
            rows = view.output_rows
            state = outputs[:, 0] if rows is None else outputs[mx.array(rows, dtype=mx.int32), 0]
            places.draw(self._logits(state), self._sampler)
            before = drawing
        for slot, length in held.items():
            self._store.roll_back(slot, length)
        forwards.follow(self._store.marker())
        return places.drafts(self._share)

    def decoded(
        self, sequences: Sequence[RunningSequence], rows: Sequence[int], hidden: mx.array | None
    ) -> None:
        """Take note of where the hidden states of a decode are; of drafts, all of them."""
        assert hidden is not None
        for sequence, row in zip(sequences, rows, strict=True):
            seen = self._seen.setdefault(sequence.sequence_id, [])
            if seen:
                # The token that this decode reads.
                seen[-1].last = sequence.last
            seen.append(Seen(hidden, row))
            while sum(one.count for one in seen[1:]) >= KEPT_MAX:
                del seen[0]

    def _catch_up(self, sequences: Sequence[RunningSequence]) -> mx.array:
        """Build the forward that enters what was seen of these rows.

        Returns:
            [sequences, dim], what stands behind the last entry of each.
        """
        pending = [self._pending(sequence) for sequence in sequences]
        counts = [sum(one.count for one in seen) for seen in pending]
        width = max(counts)
        slots = [sequence.slot for sequence in sequences]
        lengths = [
            self._store.length(slot) + count for slot, count in zip(slots, counts, strict=True)
        ]
        view = self._store.decode(slots, width)
        for slot, length in zip(slots, lengths, strict=True):
            # Padding, as where drafts are verified.
            self._store.roll_back(slot, length)
        states, tokens = _Gathered(), _Gathered()
        numbers = {slot: number for number, slot in enumerate(slots)}
        for slot in view.input_slots:
            number = numbers.get(slot)
            if number is not None:
                for one in pending[number]:
                    ids, index = one.last or _last(sequences[number])
                    states.add(one.hidden, one.row * one.hidden.shape[1], one.count)
                    tokens.add(ids, index - one.count + 1, one.count)
            states.end_row(width)
            tokens.end_row(width)
        outputs = self._head(self._forward.embed(tokens.take()), states.take(), view.caches)
        places = {slot: number for number, slot in enumerate(view.input_slots)}
        ends = [places[slot] * width + count - 1 for slot, count in zip(slots, counts, strict=True)]
        return outputs.reshape(-1, outputs.shape[-1])[mx.array(ends, dtype=mx.int32)]

    def _pending(self, sequence: RunningSequence) -> list[Seen]:
        seen = self._seen.pop(sequence.sequence_id, None)
        if not seen:
            raise InvariantBroken(
                f"sequence {sequence.sequence_id} is to follow, but no hidden state was seen of it"
            )
        return seen

    def _logits(self, state: mx.array) -> mx.array:
        """Return logits [rows, vocab] of hidden states [rows, dim]."""
        return self._forward.head(state[:, None])[:, 0]


class _Gathered:
    """What is picked out of several arrays by one gather: rows of one width."""

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}
        """By the identity of an array, where it begins in all of them together."""
        self._sources: list[mx.array] = []
        self._total = 0
        self._rows: list[list[int]] = []
        self._row: list[int] = []

    def add(self, array: mx.array, first: int, count: int) -> None:
        """Go on in a row with `count` members of an array from `first` on.

        Args:
            array: [n], or [rows, width, dim], which is n = rows * width members; it lives until
                `take`.
            first: index of a member.
            count: how many.
        """
        if id(array) not in self._offsets:
            flat = array.reshape(-1, array.shape[-1]) if array.ndim == 3 else array
            self._offsets[id(array)] = self._total
            self._sources.append(flat)
            self._total += flat.shape[0]
        start = self._offsets[id(array)] + first
        self._row += range(start, start + count)

    def end_row(self, width: int) -> None:
        """Fill a row up to `width` with any member, and begin the next."""
        self._rows.append(self._row + [0] * (width - len(self._row)))
        self._row = []

    def take(self) -> mx.array:
        """Return [rows, width, ...]."""
        sources = self._sources
        joined = sources[0] if len(sources) == 1 else mx.concatenate(sources)
        return joined[mx.array(self._rows, dtype=mx.int32)]


def _last(sequence: RunningSequence) -> tuple[mx.array, int]:
    if sequence.last is None:
        raise InvariantBroken(f"slot {sequence.slot} decodes before its prefill has ended")
    return sequence.last
