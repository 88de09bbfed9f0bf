"""Executes step plans: the state of all running sequences, and the graph of each step.

`launch` applies a plan and starts its computation; `finish` waits for it. `launch` of the next plan
may come first: the tokens that it decodes from are still on the device. So nothing that a plan is
computed from changes in `finish`: which drafts are accepted is said by a later plan. No policy
lives here: what contradicts the state ends the world.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import mlx.core as mx
import numpy as np
from mlx import nn

from services.rank_worker.batch.decode_groups import FORWARD_TOKENS
from services.rank_worker.batch.running_batch import RunningSequence, SequenceBatch
from services.rank_worker.batch.step_parts import Forwards, Launched, StepResult
from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.device.freed_buffers import FreedBuffers
from services.rank_worker.execution.decode import DecodeExecutor
from services.rank_worker.execution.prefill import PrefillExecutor
from services.rank_worker.execution.receipt import Receipt
from services.rank_worker.execution.split_launcher import SplitLauncher
from services.rank_worker.execution.step_sampling import build_draw, read_draw
from services.rank_worker.kv_cache.blocks.block_executor import (
    BlockExecutor,
    TakeRestored,
    nothing_restored,
    spill_items,
)
from services.rank_worker.kv_cache.rows import open_store
from services.rank_worker.kv_cache.rows.shapes import read_shape
from services.rank_worker.model.forward import Forward
from services.rank_worker.model.unsharded_traits import UnshardedTraits
from services.rank_worker.sampling import Sampler
from services.rank_worker.sampling.share import sharer
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter, open_proposer
from shared.errors import InvariantBroken
from shared.messages import (
    AdmittedSequence,
    RolledBack,
    SlotMove,
    StepPlan,
    TokenLogprobs,
)
from shared.transport import codec

__all__ = ["Executor", "Launched", "StepResult"]


_AS_A_CPU = ExecutionProfile()


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
        forward_tokens: int = FORWARD_TOKENS,
        kv_bits: int = 0,
        use: ExecutionProfile = _AS_A_CPU,
        take_restored: TakeRestored = nothing_restored,
        draft: LoadedDrafter | None = None,
        whole: UnshardedTraits | None = None,
    ) -> None:
        """Read the model's shape; nothing is computed and no collective runs.

        Args:
            model: loaded, and sharded where there are several ranks.
            rank: this rank.
            world_size: ranks in the world.
            synchronization: how sampled ids become equal on all ranks.
            receipt_logits: whether the digest holds the bits of each row's top logit.
            share_ids: sums an int32 array over all ranks, inside the graph; None at one rank.
            forward_tokens: see `speculation.group_rows`; the same on all ranks.
            kv_bits: per number of the KV that is kept, 4 or 8; 0: as computed.
            use: how this device wants to be used.
            take_restored: hands over the items that a plan's `adopted` makes resident.
            draft: what proposes drafts here, where plans ask for some.
            whole: what was read off the model before its layers were divided; None: it has all.

        Raises:
            ConfigError: the model's state cannot be batched, or not quantized, or the draft does
                not fit, or a part of the model is not as the whole.
        """
        model.eval()
        shape = read_shape(model)
        self._store = open_store(model, shape, kv_bits, whole.rows if whole else None)
        self._starts = SplitLauncher(self._store, in_parts=use.has_queue)
        self._blocks = BlockExecutor(self._store, take_restored)
        self._batch = SequenceBatch()
        self._vocab_size = shape.vocab_size
        share = sharer(rank, world_size, synchronization, share_ids)
        self._sampler = Sampler(shape.vocab_size, share)
        self._forward = Forward(model, narrows=whole.narrows if whole else None)
        self._proposer = open_proposer(draft, self._forward, self._store, self._sampler, share)
        parts = (self._store, self._forward, self._batch, self._proposer)
        self._prefill = PrefillExecutor(*parts, use)
        self._decode = DecodeExecutor(
            *parts, vocab_size=shape.vocab_size, forward_tokens=forward_tokens
        )
        self._receipt = Receipt()
        self._receipt_logits = receipt_logits
        self._freed = FreedBuffers(use.freed_bytes_max)

    def waits(self, plan: StepPlan) -> bool:
        """Tell whether `launch` waits for all steps before this plan: their results go first."""
        return (
            bool(plan.keep_blocks or plan.keep_checkpoints)
            or self._store.resize_waits(plan.row_count, plan.row_tokens)
            or self._prefill.waits(plan.prefill_chunks, plan.row_tokens)
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token of one row takes on this rank, all layers."""
        return self._store.bytes_per_token

    @property
    def kv_bytes_per_row(self) -> int:
        """Bytes that one row takes on this rank whatever its length."""
        return self._store.bytes_per_row + self._proposer.bytes_per_row

    @property
    def draft_bytes_per_token(self) -> int:
        """Bytes more that a token of a row takes for what proposes drafts; 0: nothing does."""
        return self._proposer.bytes_per_token

    @property
    def reads_draft_chunks(self) -> bool:
        """Whether plans must say what draft rows read."""
        return self._proposer.reads_chunks

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

    def prepare_spills(self, block_tokens: int, bytes_max: int) -> None:
        """Take what spills need, where plans will order some; see `BlockExecutor`."""
        self._blocks.prepare_spills(self.block_payload_bytes(block_tokens), bytes_max)

    @property
    def vocab_size(self) -> int:
        """Logits per position."""
        return self._vocab_size

    def begin(self) -> None:
        """Begin the chain of receipts anew; nothing may be left of the steps before."""
        if self._batch.ids():
            raise InvariantBroken(f"sequences {self._batch.ids()} are still there")
        self._receipt = Receipt()

    def launch(self, plan: StepPlan, finish_before: Callable[[], object] | None = None) -> Launched:
        """Apply a plan and start computing it.

        Args:
            plan: the next one.
            finish_before: finishes the step before, if it is still being computed; None: all are
                finished. See `SplitLauncher`: it is called when this step has work for the device
                to go on with; at once, if the step before verified drafts; and never, if this one
                does, or is started whole for another reason. Beyond that `launch` waits only
                between its own forwards and if `waits` says so (on a CPU MLX may).

        Raises:
            InvariantBroken: the plan contradicts the state; the world must end.
        """
        launched = self.prepare(plan, finish_before)
        self.start(launched)
        return launched

    def prepare(
        self, plan: StepPlan, finish_before: Callable[[], object] | None = None
    ) -> Launched:
        """Apply a plan and build its graph; `start` must follow before the next plan.

        Prefill and moves are started right here, each by itself; decodes and draws are not.
        A plan that keeps blocks beside one of them waits for the steps before it, and so does a
        long prefill of a rank that holds some of the experts.

        Args:
            plan: the next one.
            finish_before: see `launch`.

        Raises:
            InvariantBroken: the plan contradicts the state; the world must end.
        """
        self._starts.begin(finish_before)
        self._roll_back(plan.rolled_back)
        self._check_kept(plan)
        kept = self._blocks.keep(plan, self._batch.slot_of)
        if plan.prefill_chunks or plan.moves:
            # Both start to write rows right here: see `BlockExecutor.keep`.
            mx.eval(kept)
        self._blocks.adopt(plan)
        spills = self._blocks.spill(plan)
        for sequence_id in plan.dropped:
            self._drop(sequence_id)
        self._blocks.evict(plan)
        for move in plan.moves:
            self._move(move)
        self._batch.check_rows(plan.row_count)
        self._store.resize(plan.row_count, plan.row_tokens)
        self._proposer.resize(plan.row_count, plan.row_tokens)
        for admitted in plan.admitted:
            self._admit(admitted)
        forwards = Forwards(self._starts.forward)
        self._prefill.run(plan.prefill_chunks, forwards)
        readers = [self._batch.settled(one.sequence_id) for one in plan.draft_chunks]
        self._proposer.read(plan.draft_chunks, readers, forwards)
        drafts = self._decode.run(plan, forwards)
        draw = build_draw(
            plan, forwards, drafts, batch=self._batch, store=self._store, sampler=self._sampler
        )
        if draw is None and not forwards.markers:
            forwards.mark(self._store.marker())
        rows = [
            (slot, sequence_id, self._store.length(slot))
            for slot, sequence_id in self._batch.slots()
        ]
        states = self._blocks.set_aside(plan, self._batch.settled_slot_of)
        return Launched(plan, kept, rows, draw, forwards.markers, states, spills)

    def start_first_layers(self, launched: Launched) -> bool:
        """Start a first part of what `prepare` has built last, if that is one forward of decodes.

        It is small enough to wait behind the step before: a CPU takes about a hundred operations
        before `async_eval` waits for it.

        Returns:
            Whether there is such a part; `start` goes on with the rest.
        """
        others = launched.plan.prefill_chunks or launched.plan.draft_chunks or launched.kept
        if others or not _ends_in_plain_decodes(launched):
            return False
        first = self._store.first_layers(share=0.0)
        if first is not None:
            mx.async_eval(first)
        return first is not None

    def start(self, launched: Launched) -> None:
        """Start what `prepare` has built; waits for the steps before where blocks are kept."""
        mx.eval(launched.kept)
        drawn = launched.draw.arrays() if launched.draw is not None else []
        last = [*drawn, *launched.markers, *launched.states]
        if _ends_in_plain_decodes(launched):
            self._starts.forward(last)
        elif drawn or launched.states:
            mx.async_eval(last)
            if launched.plan.decodes:
                self._starts.lose_track()

    def finish(self, launched: Launched) -> StepResult:
        """Wait for a step and return its tokens and receipt. Steps finish in the order of launch.

        Raises:
            InvariantBroken: a row's logits are not numbers.
        """
        mx.eval(launched.markers)
        tokens: list[list[int]] = []
        logprobs: list[list[TokenLogprobs]] = []
        tops: list[float] = []
        proposed: list[int] = []
        if launched.draw is not None:
            tokens, logprobs, tops = read_draw(launched, launched.draw)
            drafts = launched.draw.drafts
            proposed = drafts.read() if drafts.proposed is not None else []
        digest = self._receipt.chain(
            codec.encode(launched.plan),
            launched.rows,
            [token for one in tokens for token in one] + proposed,
            tops if self._receipt_logits else None,
        )
        self._freed.note(launched.plan)
        return StepResult(tokens, logprobs, digest, spill_items(launched.spills))

    def _roll_back(self, rolled_back: Sequence[RolledBack]) -> None:
        """Cut rows to what was accepted; the last token of it is what they decode next."""
        generated: list[tuple[int, mx.array]] = []
        for one in rolled_back:
            sequence = self._batch.find(one.sequence_id)
            verifying = sequence.verifying
            accepted = one.length - verifying.base - 1 if verifying is not None else 0
            if verifying is None or not verifying.accepts(accepted):
                raise InvariantBroken(
                    f"sequence {one.sequence_id} cannot be cut to {one.length} tokens: "
                    f"{verifying.text if verifying is not None else 'it verifies no drafts'}"
                )
            self._store.roll_back(sequence.slot, one.length)
            self._proposer.roll_back(sequence, verifying.base, one.length)
            last = verifying.first + accepted
            sequence.last = verifying.ids, last
            sequence.verifying = None
            generated.append((one.sequence_id, verifying.ids[verifying.first : last + 1]))
        self._sampler.count(generated)

    def _check_kept(self, plan: StepPlan) -> None:
        """Refuse to keep what may be rejected yet: drafts never enter a block before."""
        for block in plan.keep_blocks:
            verifying = self._batch.find(block.sequence_id).verifying
            stop = block.start + block.length
            if verifying is not None and stop > verifying.base + 1:
                raise InvariantBroken(
                    f"tokens up to {stop} of sequence {block.sequence_id} are to be kept, those "
                    f"from {verifying.base + 1} on are drafts"
                )

    def _drop(self, sequence_id: int) -> None:
        sequence = self._batch.remove(sequence_id)
        self._blocks.forget(sequence_id)
        self._store.free(sequence.slot)
        self._proposer.free(sequence)
        self._sampler.drop(sequence_id)

    def _move(self, move: SlotMove) -> None:
        old = self._batch.move(move.sequence_id, move.slot)
        self._store.move(old, move.slot)
        self._proposer.move(old, move.slot)

    def _admit(self, admitted: AdmittedSequence) -> None:
        sequence_id, slot = admitted.sequence_id, admitted.slot
        tokens = np.array(admitted.tokens, dtype=np.int32)
        prompt_tokens = admitted.prompt_tokens
        if not 0 <= prompt_tokens <= len(tokens) or int(tokens.max()) >= self._vocab_size:
            raise InvariantBroken(
                f"sequence {sequence_id} has {len(tokens)} tokens up to id {int(tokens.max())}, "
                f"prompt {prompt_tokens}, vocabulary {self._vocab_size}"
            )
        self._batch.add(RunningSequence(sequence_id, slot, tokens), self._store.row_count)
        self._blocks.begin_row(slot, admitted)
        self._sampler.admit(
            sequence_id, admitted.sampling, tokens[:prompt_tokens], tokens[prompt_tokens:]
        )


def _ends_in_plain_decodes(launched: Launched) -> bool:
    """Tell whether the forward that was built last is one of decodes without drafts."""
    plan = launched.plan
    return bool(plan.decodes) and not (plan.drafts or plan.draft_counts or launched.states)
