"""Executes step plans: the state of all running sequences, and the graph of each step.

`launch` applies a plan and starts its computation; `finish` waits for it. `launch` of the next plan
may come first: the tokens that it decodes from are still on the device. No policy lives here: what
contradicts the state ends the world.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import mlx.core as mx
import numpy as np
from mlx import nn

from services.rank_worker.blocks.orders import (
    BlockOrders,
    TakeRestored,
    nothing_restored,
    spill_items,
)
from services.rank_worker.forward import Forward
from services.rank_worker.freed_buffers import FreedBuffers
from services.rank_worker.kv import open_store
from services.rank_worker.kv.shapes import read_shape
from services.rank_worker.prefill_groups import group_chunks
from services.rank_worker.receipt import Receipt
from services.rank_worker.sampling import Drawn, Sampler
from services.rank_worker.sampling.share import sharer
from services.rank_worker.step import Forwards, Launched, StepResult
from shared import codec
from shared.errors import InvariantBroken
from shared.messages import (
    AdmittedSequence,
    PrefillChunk,
    SlotMove,
    StepPlan,
    TokenLogprobs,
)

__all__ = ["Executor", "Launched", "StepResult"]


@dataclasses.dataclass(slots=True)
class _Sequence:
    slot: int
    tokens: np.ndarray
    """int32, all ids known when it was admitted."""
    last: tuple[mx.array, int] | None = None
    """Where its last token lies on the device: (ids of some step, index). None: not prefilled."""


class Executor:
    """The state of one rank in one epoch."""

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int,
        world_size: int,
        synchronization: Literal["broadcast", "verify"],
        receipt_logits: bool,
        share_ids: Callable[[mx.array], mx.array] | None,
        batch_prefill: bool = True,
        take_restored: TakeRestored = nothing_restored,
    ) -> None:
        """Read the model's shape; nothing is computed and no collective runs.

        Args:
            model: loaded, and sharded where there are several ranks.
            rank: this rank.
            world_size: ranks in the world.
            synchronization: how sampled ids become equal on all ranks.
            receipt_logits: whether the digest holds the bits of each row's top logit.
            share_ids: sums an int32 array over all ranks, inside the graph; None at one rank.
            batch_prefill: prefill short prompts of nearly one length by one forward.
            take_restored: hands over the items that a plan's `adopted` makes resident.

        Raises:
            ConfigError: the model keeps a kind of state that cannot be batched.
        """
        model.eval()
        shape = read_shape(model)
        self._store = open_store(model, shape)
        self._blocks = BlockOrders(self._store, take_restored)
        self._forward = Forward(model)
        self._groups_chunks = batch_prefill and self._store.can_pad and self._forward.narrows
        self._vocab_size = shape.vocab_size
        self._receipt = Receipt()
        self._receipt_logits = receipt_logits
        self._sequences: dict[int, _Sequence] = {}
        self._owners: dict[int, int] = {}
        """Sequence id by slot."""
        self._sampler = Sampler(
            shape.vocab_size,
            sharer(rank, world_size, synchronization, share_ids),
        )
        self._freed = FreedBuffers()

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token of one row takes on this rank, all layers."""
        return self._store.bytes_per_token

    @property
    def kv_bytes_per_row(self) -> int:
        """Bytes that one row takes on this rank whatever its length."""
        return self._store.bytes_per_row

    @property
    def can_roll_back(self) -> bool:
        """Whether rows can be shortened, so that drafts can be verified."""
        return self._store.can_roll_back

    @property
    def needs_checkpoints(self) -> bool:
        """Whether a row begins from blocks only where there is a checkpoint too."""
        return self._store.needs_state

    @property
    def kv_layout(self) -> str:
        """How block bytes are laid out on this rank; "": blocks cannot be kept."""
        return self._store.layout_text

    @property
    def resident_bytes(self) -> int:
        """Bytes of all resident blocks and checkpoints."""
        return self._blocks.total_bytes

    def block_payload_bytes(self, tokens: int) -> int:
        """Return the bytes of a block of so many tokens; 0 where blocks cannot be kept."""
        layout = self._store.layout
        return layout.block_bytes(tokens) if layout is not None else 0

    @property
    def vocab_size(self) -> int:
        """Logits per position."""
        return self._vocab_size

    def begin(self) -> None:
        """Begin the chain of receipts anew; nothing may be left of the steps before."""
        if self._sequences:
            raise InvariantBroken(f"sequences {sorted(self._sequences)} are still there")
        self._receipt = Receipt()

    def launch(self, plan: StepPlan) -> Launched:
        """Apply a plan and start computing it. Waits only to keep blocks (on a CPU MLX may).

        Raises:
            InvariantBroken: the plan contradicts the state; the world must end.
        """
        launched = self.prepare(plan)
        self.start(launched)
        return launched

    def prepare(self, plan: StepPlan) -> Launched:
        """Apply a plan and build its graph; `start` must follow before the next plan.

        Prefill is started right here, each forward by itself; decodes and draws are not. A plan
        that keeps blocks and prefills waits for the steps before it.

        Raises:
            InvariantBroken: the plan contradicts the state; the world must end.
        """
        if plan.drafts:
            raise InvariantBroken(f"plan {plan.step_id} has drafts; this rank does not verify any")
        kept = self._blocks.keep(plan, self._slot_of)
        if plan.prefill_chunks:
            mx.eval(kept)
        self._blocks.adopt(plan)
        spills = self._blocks.spill(plan)
        for sequence_id in plan.dropped:
            self._drop(sequence_id)
        self._blocks.evict(plan)
        for move in plan.moves:
            self._move(move)
        self._resize(plan.row_count, plan.row_tokens)
        for admitted in plan.admitted:
            self._admit(admitted)
        forwards = Forwards()
        chunks = plan.prefill_chunks
        for group in group_chunks(chunks) if self._groups_chunks else [[one] for one in chunks]:
            if len(group) == 1:
                self._prefill(group[0], forwards)
            else:
                self._prefill_together(group, forwards)
        if plan.decodes:
            self._decode(plan.decodes, forwards)
        sampled = [one.sequence_id for one in chunks if one.samples] + plan.decodes
        drawn = self._draw(forwards, sampled)
        if drawn is None and not forwards.markers:
            self._mark(forwards)
        rows = [
            (slot, sequence_id, self._store.length(slot))
            for slot, sequence_id in sorted(self._owners.items())
        ]
        states = self._blocks.set_aside(plan, self._slot_of)
        return Launched(plan, kept, rows, len(sampled), drawn, forwards.markers, states, spills)

    def start(self, launched: Launched) -> None:
        """Start what `prepare` has built; waits for the steps before where blocks are kept."""
        mx.eval(launched.kept)
        drawn = launched.drawn.arrays() if launched.drawn is not None else []
        if drawn or launched.states:
            mx.async_eval([*drawn, *launched.states])

    def finish(self, launched: Launched) -> StepResult:
        """Wait for a step and return its tokens and receipt. Steps finish in the order of launch.

        Raises:
            InvariantBroken: a row's logits are not numbers.
        """
        mx.eval(launched.markers)
        tokens: list[int] = []
        tops: list[float] = []
        logprobs: list[list[TokenLogprobs]] = []
        if launched.drawn is not None:
            mx.eval(launched.drawn.arrays())
            tokens = launched.drawn.tokens.tolist()  # type: ignore[assignment]
            tops = launched.drawn.top_logits.tolist()  # type: ignore[assignment]
            if not all(map(math.isfinite, tops)):
                raise InvariantBroken(
                    f"logits of step {launched.plan.step_id} are not finite: highest per row {tops}"
                )
            if launched.drawn.logprobs is not None:
                logprobs = launched.drawn.logprobs.read(launched.sampled)
        digest = self._receipt.chain(
            codec.encode(launched.plan),
            launched.rows,
            tokens,
            tops if self._receipt_logits else None,
        )
        self._freed.note(launched.plan)
        spills = spill_items(launched.spills)
        return StepResult([[token] for token in tokens], logprobs, digest, spills)

    def _find(self, sequence_id: int) -> _Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise InvariantBroken(f"the plan names sequence {sequence_id}, which is not here")
        return sequence

    def _slot_of(self, sequence_id: int) -> int:
        return self._find(sequence_id).slot

    def _drop(self, sequence_id: int) -> None:
        sequence = self._find(sequence_id)
        self._blocks.forget(sequence_id)
        self._store.free(sequence.slot)
        self._sampler.drop(sequence_id)
        del self._owners[sequence.slot]
        del self._sequences[sequence_id]

    def _move(self, move: SlotMove) -> None:
        sequence = self._find(move.sequence_id)
        if move.slot >= sequence.slot or move.slot in self._owners:
            raise InvariantBroken(
                f"sequence {move.sequence_id} cannot move from slot {sequence.slot} to "
                f"{move.slot}, held by {self._owners.get(move.slot)}"
            )
        self._store.move(sequence.slot, move.slot)
        del self._owners[sequence.slot]
        self._owners[move.slot] = move.sequence_id
        sequence.slot = move.slot

    def _resize(self, row_count: int, row_tokens: int) -> None:
        if any(slot >= row_count for slot in self._owners):
            raise InvariantBroken(
                f"slots {sorted(self._owners)} are held, the plan keeps {row_count} rows"
            )
        self._store.resize(row_count, row_tokens)

    def _admit(self, admitted: AdmittedSequence) -> None:
        sequence_id, slot = admitted.sequence_id, admitted.slot
        if sequence_id in self._sequences or slot in self._owners or slot >= self._store.row_count:
            raise InvariantBroken(
                f"sequence {sequence_id} cannot enter slot {slot}: "
                f"{self._store.row_count} rows, held {sorted(self._owners.items())}"
            )
        tokens = np.array(admitted.tokens, dtype=np.int32)
        prompt_tokens = admitted.prompt_tokens
        if not 0 <= prompt_tokens <= len(tokens) or int(tokens.max()) >= self._vocab_size:
            raise InvariantBroken(
                f"sequence {sequence_id} has {len(tokens)} tokens up to id {int(tokens.max())}, "
                f"prompt {prompt_tokens}, vocabulary {self._vocab_size}"
            )
        self._blocks.begin_row(slot, admitted)
        self._owners[slot] = sequence_id
        self._sequences[sequence_id] = _Sequence(slot, tokens)
        self._sampler.admit(
            sequence_id, admitted.sampling, tokens[:prompt_tokens], tokens[prompt_tokens:]
        )

    def _prefill(self, chunk: PrefillChunk, forwards: Forwards) -> None:
        sequence = self._check_chunk(chunk)
        slot, start, stop = sequence.slot, chunk.start, chunk.start + chunk.length
        if chunk.samples and self._forward.splits(chunk.length):
            tokens = mx.array(sequence.tokens[start : stop - 1])[None]
            self._forward.fill(tokens, self._store.prefill(slot, chunk.length - 1))
            self._mark(forwards)
            start = stop - 1
        tokens = mx.array(sequence.tokens[start:stop])[None]
        caches = self._store.prefill(slot, stop - start)
        if not chunk.samples:
            self._forward.fill(tokens, caches)
            self._mark(forwards)
            return
        forwards.add(self._forward.last_logits(tokens, caches), [chunk.sequence_id])

    def _prefill_together(self, group: Sequence[PrefillChunk], forwards: Forwards) -> None:
        sequences = [self._check_chunk(chunk) for chunk in group]
        lengths = [chunk.length for chunk in group]
        padded = np.zeros((len(group), max(lengths)), dtype=np.int32)
        for row, sequence in zip(padded, sequences, strict=True):
            row[: len(sequence.tokens)] = sequence.tokens
        slots = [sequence.slot for sequence in sequences]
        caches = self._store.prefill_together(slots, lengths)
        ends = mx.array(lengths, dtype=mx.int32) - 1
        logits = self._forward.ends_logits(mx.array(padded), caches, ends)
        forwards.add(logits, [chunk.sequence_id for chunk in group])

    def _mark(self, forwards: Forwards) -> None:
        marker = self._store.marker()
        mx.async_eval(marker)
        forwards.markers.append(marker)

    def _check_chunk(self, chunk: PrefillChunk) -> _Sequence:
        sequence = self._find(chunk.sequence_id)
        length, known = self._store.length(sequence.slot), len(sequence.tokens)
        stop = chunk.start + chunk.length
        if chunk.start != length or stop > known or chunk.samples != (stop == known):
            raise InvariantBroken(
                f"chunk [{chunk.start}, {stop}) samples={chunk.samples} of sequence "
                f"{chunk.sequence_id}: its row holds {length} of {known} known tokens"
            )
        return sequence

    def _decode(self, decodes: Sequence[int], forwards: Forwards) -> None:
        sequences = [self._find(sequence_id) for sequence_id in decodes]
        slots = [sequence.slot for sequence in sequences]
        if any(after <= before for before, after in itertools.pairwise(slots)):
            raise InvariantBroken(f"decodes {list(decodes)} are not in slot order: slots {slots}")
        view = self._store.decode(slots, 1)
        tokens = self._last_tokens(dict(zip(slots, sequences, strict=True)), view.input_slots)
        logits = self._forward.all_logits(tokens[:, None], view.caches)[:, -1]
        if view.output_rows is not None:
            logits = logits[mx.array(view.output_rows, dtype=mx.int32)]
        # The draw starts it.
        forwards.logits.append(logits)
        forwards.sequence_ids += decodes

    def _last_tokens(self, by_slot: dict[int, _Sequence], slots: Sequence[int]) -> mx.array:
        """Return the last sampled token of each slot, int32 [slots]; 0 in holes."""
        sources: list[mx.array] = []
        offsets: dict[int, int] = {}
        indices: list[int] = []
        total = 0
        for slot in slots:
            if slot not in by_slot:
                indices.append(0)
                continue
            last = by_slot[slot].last
            if last is None:
                raise InvariantBroken(f"slot {slot} decodes before its prefill has ended")
            ids, index = last
            if id(ids) not in offsets:
                offsets[id(ids)] = total
                sources.append(ids)
                total += ids.shape[0]
            indices.append(offsets[id(ids)] + index)
        tokens = sources[0] if len(sources) == 1 else mx.concatenate(sources)
        if indices == list(range(total)):
            # The same rows as in the step before: its tokens are the input as they are.
            return tokens
        return tokens[mx.array(indices, dtype=mx.int32)]

    def _draw(self, forwards: Forwards, sequence_ids: list[int]) -> Drawn | None:
        if not sequence_ids:
            return None
        sequences = [self._sequences[one] for one in sequence_ids]
        # The new token's position is the number of tokens before it, all of which are in the row.
        positions = [self._store.length(sequence.slot) for sequence in sequences]
        drawn = self._sampler.draw(forwards.in_order(sequence_ids), sequence_ids, positions)
        for index, sequence in enumerate(sequences):
            sequence.last = (drawn.tokens, index)
        return drawn
