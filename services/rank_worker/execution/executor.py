"""Execution of step plans on one rank. Owns the state of all running sequences; decides nothing.

`launch` applies a plan and starts its computation; `finish` waits for it. The next plan may be
launched before: the tokens that it decodes from are still on the device. So `finish` changes no
state that a plan depends on; a later plan says which drafts are accepted. A plan that contradicts
the state ends the world.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

import mlx.core as mx
from mlx import nn

from services.rank_worker.batch.decode_groups import FORWARD_COST_TOKENS
from services.rank_worker.batch.running_batch import SequenceBatch
from services.rank_worker.batch.step_outputs import (
    ForwardOutputs,
    LaterSample,
    LaunchedStep,
    StepResult,
    StepSample,
)
from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.device.freed_buffers import FreedBuffers
from services.rank_worker.execution.batch_changes import BatchChanges
from services.rank_worker.execution.decode import DecodeExecutor
from services.rank_worker.execution.prefill import PrefillExecutor
from services.rank_worker.execution.receipt import ReceiptChain
from services.rank_worker.execution.split_launcher import SplitLauncher
from services.rank_worker.execution.step_sampling import StepSampling, read_sample
from services.rank_worker.kv_cache.blocks.block_executor import (
    BlockExecutor,
    TakeRestored,
    read_spills,
    refuse_restores,
)
from services.rank_worker.kv_cache.rows.interface import KVStore
from services.rank_worker.kv_cache.rows.kv_shapes import ModelShape, read_shape
from services.rank_worker.kv_cache.rows.store_choice import open_store
from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.model.fast_path.opening import FastPathSettings, open_fast_path
from services.rank_worker.model.forward import Forward
from services.rank_worker.model.unsharded_traits import UnshardedTraits
from services.rank_worker.profiling.step_profiler import StepParts, StepProfiler
from services.rank_worker.sampling.drafts import StepDrafts
from services.rank_worker.sampling.grammar.compiler import GrammarCompiler
from services.rank_worker.sampling.grammar.masks import StepMasks
from services.rank_worker.sampling.sampler import Sampler, id_synchronizer
from services.rank_worker.sampling.vocabulary import VocabularyPart
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter, open_proposer
from shared.errors import InvariantBroken
from shared.messages import StepPlan, TokenLogprobs
from shared.transport import codec

_CPU_PROFILE = ExecutionProfile()


class Executor:
    """Executes the step plans of one epoch on one rank.

    Owns the rows (`store`), blocks (`blocks`), drafter (`proposer`) and sampling settings of all
    running sequences. Others only read what these say about themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int,
        world_size: int,
        synchronization: Literal["broadcast", "independent"],
        receipt_logits: bool,
        sum_ids: Callable[[mx.array], mx.array] | None,
        forward_cost_tokens: int = FORWARD_COST_TOKENS,
        kv_bits: int = 0,
        profile: ExecutionProfile = _CPU_PROFILE,
        take_restored: TakeRestored = refuse_restores,
        drafter: LoadedDrafter | None = None,
        traits: UnshardedTraits | None = None,
        grammars: GrammarCompiler | None = None,
        expert_counter: ExpertCounter | None = None,
        fast_path: FastPathSettings | None = None,
        vocabulary: VocabularyPart | None = None,
    ) -> None:
        """Read the model's shape. Without a fast path nothing is computed, and no collective runs.

        Args:
            model: loaded, and sharded where there are several ranks.
            rank: this rank.
            world_size: number of ranks.
            synchronization: how sampled ids become equal on all ranks; see `id_synchronizer`.
            receipt_logits: whether the digest covers the bits of each row's highest logit.
            sum_ids: sums an int32 array over all ranks, as part of the graph; None with one rank.
            forward_cost_tokens: see `group_decode_rows`; the same on all ranks.
            kv_bits: bits per number of stored KV, 4 or 8; 0: the model's own dtype.
            profile: how work is best given to this device.
            take_restored: returns the restored items that a plan adopts.
            drafter: draft model or head, for plans that have the ranks propose drafts.
            traits: read before the layers were divided; None: the model is whole.
            grammars: compiles grammars; None: plans have none.
            expert_counter: counts assignments to experts; None: they are not counted.
            fast_path: how the fast path is opened; None: it is switched off.
            vocabulary: the part whose logits the model computes; None: it computes all.

        Raises:
            ConfigError: the state cannot be batched or quantized, or the drafter does not fit.
        """
        shape, self.store, forward = _open_model(model, kv_bits, profile, traits, expert_counter)
        self._launcher = SplitLauncher(self.store, in_parts=profile.has_queue)
        self.blocks, self._batch = BlockExecutor(self.store, take_restored), SequenceBatch()
        self.vocabulary = vocabulary or VocabularyPart(shape.vocab_size)
        synchronize = id_synchronizer(rank, world_size, synchronization, sum_ids)
        self._sampler = Sampler(self.vocabulary, synchronize)
        self._sampling = StepSampling(self._batch, self.store, self._sampler)
        self.layers_state = open_fast_path(forward, self.store, shape, fast_path, kv_bits).state
        self.proposer = open_proposer(drafter, forward, self.store, self._sampler, synchronize)
        self._open_parts(forward, profile, grammars, forward_cost_tokens)
        self._profiler = StepProfiler(model, drafter, self.store, rank, sum_ids)
        self._receipt, self._expert_counter = ReceiptChain(), expert_counter
        self._receipt_logits, self._freed = receipt_logits, FreedBuffers(profile.freed_bytes_max)

    def _open_parts(
        self,
        forward: Forward,
        profile: ExecutionProfile,
        grammars: GrammarCompiler | None,
        forward_cost_tokens: int,
    ) -> None:
        """Open what applies a plan and builds its forwards."""
        self._changes = BatchChanges(
            store=self.store,
            blocks=self.blocks,
            batch=self._batch,
            proposer=self.proposer,
            sampler=self._sampler,
            grammars=grammars,
            vocab_size=self.vocab_size,
        )
        self._prefill = PrefillExecutor(
            store=self.store,
            forward=forward,
            batch=self._batch,
            proposer=self.proposer,
            profile=profile,
        )
        self._decode = DecodeExecutor(
            store=self.store,
            forward=forward,
            batch=self._batch,
            proposer=self.proposer,
            vocab_size=self.vocab_size,
            forward_cost_tokens=forward_cost_tokens,
        )

    def waits_for_earlier_steps(self, plan: StepPlan) -> bool:
        """Tell whether `launch` of this plan waits until the device has finished all earlier steps.

        If so, the caller should finish these steps and send their results before it launches the
        plan.
        """
        return bool(
            plan.profile
            # MLX writes the draft model's rows in place only if no step in flight uses them, and
            # would copy them all otherwise. Prefills that MLX writes wait for earlier steps between
            # their two parts, before these chunks are read; forwards in place do not.
            or (self.store.writes_in_place and plan.draft_chunks)
            or self._changes.waits_for_earlier_steps(plan)
            or self._prefill.waits_for_earlier_steps(plan.prefill_chunks, plan.row_tokens)
            or self._decode.waits_for_earlier_steps(plan)
        )

    @property
    def shares_forwards(self) -> bool:
        """Whether several prompts may share a forward."""
        return self._prefill.shares_forwards

    @property
    def vocab_size(self) -> int:
        """Number of token ids, V."""
        return self.vocabulary.size

    @property
    def kv_bytes_per_row(self) -> int:
        """Additional bytes per row, independent of its length, for the model and the drafter."""
        return self.store.bytes_per_row + self.proposer.bytes_per_row

    def restart_receipts(self) -> None:
        """Start a new hash chain of receipts and new counts, as if no step had been executed.

        Raises:
            InvariantBroken: sequences are left in the batch.
        """
        left = sorted(sequence_id for _, sequence_id in self._batch.occupied_slots())
        if left:
            raise InvariantBroken(f"sequences {left} are still in the batch")
        self._receipt = ReceiptChain()
        if self._expert_counter is not None:
            self._expert_counter.restart()

    def launch(
        self, plan: StepPlan, finish_before: Callable[[], object] | None = None
    ) -> LaunchedStep:
        """Apply a plan and start its computation.

        Waits only between its own forwards and where `waits_for_earlier_steps` says so; on a CPU
        MLX may wait.

        Args:
            plan: the next one.
            finish_before: waits for the previous step and sends its result; None if all steps are
                finished. Called at most once: between the two parts of the first forward that is
                started in parts (`SplitLauncher`), or before them if the previous step verified
                drafts; if forwards start whole, before the second prefill; and at the latest
                when masks of grammars are filled.

        Raises:
            InvariantBroken: the plan contradicts the state; the world must end.
        """
        launched = self.prepare(plan, finish_before)
        self.start(launched)
        return launched

    def prepare(
        self, plan: StepPlan, finish_before: Callable[[], object] | None = None
    ) -> LaunchedStep:
        """Apply a plan and build its graph. `start` must follow before the next plan.

        Prefill and moves are started here, one by one; decodes and sampling are not. A plan that
        keeps blocks beside prefill or moves waits for the earlier steps, as does a long prefill on
        a rank that holds only some of the experts.

        Args:
            plan: the next one.
            finish_before: see `launch`.

        Raises:
            InvariantBroken: the plan contradicts the state; the world must end.
        """
        with self._profiler.step(plan) as parts:
            launched = self._build(plan, finish_before, parts)
        launched.profile = parts.profile
        return launched

    def _build(
        self, plan: StepPlan, finish_before: Callable[[], object] | None, parts: StepParts
    ) -> LaunchedStep:
        self._launcher.begin(finish_before)
        with parts.part("blocks"):
            kept, spills = self._changes.apply(plan)
            parts.wait(kept)
        forwards = ForwardOutputs(self._launcher.start_prefill)
        with parts.part("norms"):
            drafts = self._build_forwards(plan, forwards)
            parts.wait(forwards.logits, forwards.markers)
        sample, later = self._sampling.build_if_known(plan, forwards, drafts, parts)
        if sample is None and later is None and not forwards.markers:
            forwards.start_marker(self.store.marker())
        rows = [
            (slot, sequence_id, self.store.length(slot))
            for slot, sequence_id in self._batch.occupied_slots()
        ]
        states = self.blocks.snapshot_state(plan, lambda one: self._batch.find_verified(one).slot)
        counter = self._expert_counter
        counts, reads_counts = counter.take_new(plan.step_id) if counter else (None, False)
        return LaunchedStep(
            plan=plan,
            kept=kept,
            rows=rows,
            sample=sample,
            later=later,
            markers=forwards.markers,
            states=states,
            spills=spills,
            expert_counts=[] if counts is None else [counts],
            reads_counts=reads_counts,
        )

    def _build_forwards(self, plan: StepPlan, forwards: ForwardOutputs) -> StepDrafts:
        """Build all forwards of a plan; return the drafts that its decodes verify."""
        self._prefill.run(plan.prefill_chunks, forwards)
        draft_readers = [
            self._batch.find_verified(chunk.sequence_id) for chunk in plan.draft_chunks
        ]
        self.proposer.read(plan.draft_chunks, draft_readers, forwards)
        return self._decode.run(plan, forwards)

    def start_first_layers(self, launched: LaunchedStep) -> bool:
        """Start the first layers of the step that `prepare` built, if it only decodes.

        This part is small enough to queue behind the previous step: on a CPU `async_eval` accepts
        about a hundred operations before it waits.

        Returns:
            Whether a part was started; `start` starts the rest.
        """
        has_other_work = launched.plan.prefill_chunks or launched.plan.draft_chunks or launched.kept
        if has_other_work or not launched.ends_in_plain_decodes:
            return False
        early_layer_keys = self.store.early_layer_keys(share=0.0)
        if early_layer_keys is not None:
            mx.async_eval(early_layer_keys)
        return early_layer_keys is not None

    def start(self, launched: LaunchedStep) -> None:
        """Start the step that `prepare` built. Waits for earlier steps if this one keeps blocks."""
        mx.eval(launched.kept)
        if launched.later is None:
            self._start_outputs(launched, _arrays(launched.sample))
            return
        masks = self._start_and_fill(launched, launched.later)
        launched.sample = launched.later.build(masks)
        launched.later = None
        mx.async_eval(_arrays(launched.sample))

    def _start_and_fill(self, launched: LaunchedStep, later: LaterSample) -> StepMasks:
        """Start a step's forwards and fill its masks, while the device computes."""
        if launched.plan.draft_counts:
            # Reads drafts from the device, which only this thread uses.
            masks = None if self._launcher.in_parts else later.fill_masks()
            self._start_outputs(launched, later.logits)
            self._launcher.finish_previous_step()
            return later.fill_masks() if masks is None else masks
        # Where the device has a queue, the masks are filled while the second part of the forward
        # is started. On a CPU `async_eval` returns when the forwards are nearly computed.
        filling: Future[Future[StepMasks]] = Future()
        self._launcher.when_previous_step_is_finished(
            lambda: filling.set_result(self._sampling.mask_thread.submit(later.fill_masks))
        )
        self._start_outputs(launched, later.logits)
        self._launcher.finish_previous_step()
        return filling.result().result()

    def _start_outputs(self, launched: LaunchedStep, sampled: Sequence[mx.array]) -> None:
        outputs = [*sampled, *launched.markers, *launched.states, *launched.expert_counts]
        if not launched.reads_counts:
            # Without a reference the next step adds to the array in place.
            launched.expert_counts = []
        if launched.ends_in_plain_decodes:
            self._launcher.start_forward(outputs)
        elif outputs:
            mx.async_eval(outputs)
            if launched.plan.decodes:
                self._launcher.forget_progress()

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Wait for a step and return its tokens and receipt. Steps finish in the order of launch.

        Args:
            launched: the oldest step that is not finished.

        Raises:
            InvariantBroken: the logits of a row are not finite.
        """
        mx.eval(launched.markers)
        tokens: list[list[int]] = []
        logprobs: list[list[TokenLogprobs]] = []
        top_logits: list[float] = []
        proposed: list[int] = []
        masks = launched.sample.masks if launched.sample is not None else None
        if launched.sample is not None:
            tokens, logprobs, top_logits = read_sample(launched, launched.sample)
            drafts = launched.sample.drafts
            proposed = drafts.read_ids() if drafts.proposed_ids is not None else []
        digest = self._receipt.add_step(
            codec.encode(launched.plan),
            launched.rows,
            [token for sequence_tokens in tokens for token in sequence_tokens] + proposed,
            top_logits if self._receipt_logits else None,
            masks.digest() if masks is not None else b"",
        )
        if self._expert_counter is not None and launched.expert_counts:
            self._expert_counter.read(launched.expert_counts[0])
        self._freed.step_finished(launched.plan)
        failures = masks.failures if masks is not None else []
        return StepResult(tokens, logprobs, digest, read_spills(launched.spills), failures)


def _arrays(sample: StepSample | None) -> list[mx.array]:
    return sample.arrays() if sample is not None else []


def _open_model(
    model: nn.Module,
    kv_bits: int,
    profile: ExecutionProfile,
    traits: UnshardedTraits | None,
    expert_counter: ExpertCounter | None,
) -> tuple[ModelShape, KVStore, Forward]:
    model.eval()
    shape = read_shape(model)
    kind, at_once = traits.row_kind if traits else None, profile.resize_at_once_bytes_max
    store = open_store(model, shape, kv_bits, kind, resize_at_once_bytes_max=at_once)
    can_select = traits.can_select if traits else None
    return shape, store, Forward(model, expert_counter, can_select=can_select)
