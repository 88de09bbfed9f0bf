"""Changes of the running batch. Owns what a plan does to the state before its forwards.

A plan that contradicts the state ends the world.
"""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from services.rank_worker.batch.running_batch import RunningSequence, SequenceBatch
from services.rank_worker.kv_cache.blocks.block_executor import BlockExecutor, PendingSpill
from services.rank_worker.kv_cache.rows.interface import KVStore
from services.rank_worker.sampling.grammar.compiler import GrammarCompiler
from services.rank_worker.sampling.sampler import Sampler
from services.rank_worker.speculation.proposer import RankProposer
from shared.errors import InvariantBroken
from shared.messages import AdmittedSequence, RolledBack, StepPlan


@dataclasses.dataclass(frozen=True, slots=True)
class BatchChanges:
    """Applies the parts of plans that come before their forwards. Owns no state."""

    store: KVStore
    """KV of all rows."""
    blocks: BlockExecutor
    """Resident blocks."""
    batch: SequenceBatch
    """The running sequences."""
    proposer: RankProposer
    """Has rows of its own where this rank proposes drafts."""
    sampler: Sampler
    """Has the settings of every sequence."""
    grammars: GrammarCompiler | None
    """Compiles the grammars of admitted sequences; None: plans have none."""
    vocab_size: int
    """Token ids of admitted sequences must be below it."""

    def waits_for_earlier_steps(self, plan: StepPlan) -> bool:
        """Tell whether `apply` waits for the device, or needs rows as all earlier steps leave them.

        Where kernels write rows in place, MLX does not know that its other uses of rows depend on
        these kernels.
        """
        resizes = (plan.row_count, plan.row_tokens) != (self.store.row_count, self.store.row_tokens)
        uses_rows = any(one.reused_tokens for one in plan.admitted) or plan.moves or resizes
        return bool(
            plan.keep_blocks
            or plan.keep_checkpoints
            or (self.store.writes_in_place and uses_rows)
            or self.store.resize_waits_for_device(plan.row_count, plan.row_tokens)
        )

    def apply(self, plan: StepPlan) -> tuple[list[mx.array], list[PendingSpill]]:
        """Apply the parts of a plan that come before its forwards, in the order of its fields.

        Returns:
            (payloads of the blocks that it keeps, blocks to write to files).

        Raises:
            InvariantBroken: the plan contradicts the state.
        """
        self._roll_back(plan.rolled_back)
        self._check_kept(plan)
        kept = self.blocks.keep(plan, lambda one: self.batch.find(one).slot)
        if plan.prefill_chunks or plan.moves:
            # Prefill and moves start to write rows at once: see `BlockExecutor.keep`.
            mx.eval(kept)
        self.blocks.adopt(plan)
        spills = self.blocks.spill(plan)
        for sequence_id in plan.dropped:
            self._drop(sequence_id)
        self.blocks.evict(plan)
        for move in plan.moves:
            old = self.batch.move(move.sequence_id, move.slot)
            self.store.move(old, move.slot)
            self.proposer.move(old, move.slot)
        self.batch.check_row_count(plan.row_count)
        self.store.resize(plan.row_count, plan.row_tokens)
        self.proposer.resize(plan.row_count, plan.row_tokens)
        for admitted in plan.admitted:
            self._admit(admitted, plan.step_id)
        return kept, spills

    def _roll_back(self, rolled_back: Sequence[RolledBack]) -> None:
        """Cut rows to their accepted tokens; the last accepted token is decoded next."""
        generated: list[tuple[int, mx.array]] = []
        for cut in rolled_back:
            sequence = self.batch.find(cut.sequence_id)
            verification = sequence.verification
            accepted = cut.length - verification.base_length - 1 if verification is not None else 0
            if verification is None or not verification.allows(accepted):
                raise InvariantBroken(
                    f"sequence {cut.sequence_id} cannot be cut to {cut.length} tokens: "
                    f"{verification.description if verification else 'it has no unverified drafts'}"
                )
            self.store.roll_back(sequence.slot, cut.length)
            self.proposer.roll_back(sequence, verification.base_length, cut.length)
            last_index = verification.first_index + accepted
            sequence.last_token = verification.sampled_ids, last_index
            sequence.verification = None
            accepted_ids = verification.sampled_ids[verification.first_index : last_index + 1]
            generated.append((cut.sequence_id, accepted_ids))
        self.sampler.count(generated)

    def _check_kept(self, plan: StepPlan) -> None:
        """Refuse to keep drafts that may still be rejected."""
        for block in plan.keep_blocks:
            verification = self.batch.find(block.sequence_id).verification
            stop = block.start + block.length
            if verification is not None and stop > verification.base_length + 1:
                raise InvariantBroken(
                    f"tokens up to {stop} of sequence {block.sequence_id} are to be kept, but "
                    f"those from {verification.base_length + 1} on are unverified drafts"
                )

    def _drop(self, sequence_id: int) -> None:
        sequence = self.batch.remove(sequence_id)
        self.blocks.forget(sequence_id)
        self.store.free(sequence.slot)
        self.proposer.free(sequence)
        self.sampler.drop(sequence_id)
        if sequence.matcher is not None:
            sequence.matcher.drop()

    def _admit(self, admitted: AdmittedSequence, step_id: int) -> None:
        sequence_id, slot = admitted.sequence_id, admitted.slot
        tokens = np.array(admitted.tokens, dtype=np.int32)
        prompt_tokens = admitted.prompt_tokens
        if not 0 <= prompt_tokens <= len(tokens) or int(tokens.max()) >= self.vocab_size:
            raise InvariantBroken(
                f"sequence {sequence_id} has {len(tokens)} tokens, {prompt_tokens} in the prompt, "
                f"with ids up to {int(tokens.max())}; the vocabulary size is {self.vocab_size}"
            )
        sequence = RunningSequence(sequence_id, slot, tokens)
        if admitted.grammar is not None:
            if self.grammars is None:
                raise InvariantBroken(
                    f"sequence {sequence_id} has a grammar, but this rank compiles none"
                )
            generated = tokens[prompt_tokens:].tolist()
            sequence.matcher = self.grammars.start(
                admitted.grammar, generated, sequence_id, step_id, admitted.tenant
            )
        self.batch.add(sequence, self.store.row_count)
        self.blocks.begin_row(slot, admitted)
        self.sampler.admit(
            sequence_id, admitted.sampling, tokens[:prompt_tokens], tokens[prompt_tokens:]
        )
