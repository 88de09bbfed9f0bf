"""Scheduler stand-in for ranks that propose drafts themselves."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.models import llama

from services.rank_worker.batch.step_outputs import LaunchedStep, StepResult
from services.rank_worker.speculation.draft_model import DraftModelProposer
from services.rank_worker.speculation.eagle_head import EagleHead
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter
from shared.messages import DraftChunk, StepPlan
from tests.mlx.speculation.speculation_driver import NO_BLOCKS, SpeculationDriver


class DrafterDriver(SpeculationDriver):
    """Steps with numbers of drafts: `step(decodes=[...], counts={sequence: count, ...})`."""

    def __init__(
        self,
        model: nn.Module,
        draft: LoadedDrafter,
        row_count: int = 4,
        row_tokens: int = 128,
        block_tokens: int = NO_BLOCKS,
        **changes: Any,
    ) -> None:
        super().__init__(model, row_count, row_tokens, block_tokens, drafter=draft, **changes)
        self.draft_lengths: dict[int, int] = {}
        """Tokens in the draft row, by sequence."""
        self.proposed_drafts = 0
        self.accepted_drafts = 0
        """Total numbers of proposed and accepted drafts."""
        self._slots: dict[int, int] = {}

    def plan(self, **fields: Any) -> StepPlan:
        """Return the next plan; draft rows that are behind read the missing tokens.

        Args:
            fields: `counts`, the number of drafts by sequence: 0 keeps the draft row up to date, -1
                leaves it behind; None: a plan without draft counts. The others as in
                `SpeculationDriver`.
        """
        counts: Mapping[int, int] | None = fields.pop("counts", None)
        decodes = fields.get("decodes", [])
        reads = self.executor.proposer.needs_chunks
        accepted = self.accepted.copy()
        for one in fields.get("roll_back", sorted(accepted)):
            length = self.lengths[one] + accepted[one]
            self.draft_lengths[one] = min(self.draft_lengths[one], length)
        for one in fields.get("admitted", []):
            self.draft_lengths[one.sequence_id] = 0
            self._slots[one.sequence_id] = one.slot
        for one in fields.get("dropped", []):
            del self._slots[one], self.draft_lengths[one]
        for one, slot in fields.get("moves", []):
            self._slots[one] = slot
        if counts is not None and decodes:
            fields["draft_counts"] = [counts.get(one, 0) for one in decodes]
            chunks = fields.setdefault("draft_chunks", [])
            for one, count in zip(decodes, fields["draft_counts"], strict=True):
                if count < 0:
                    continue
                length = self.lengths[one] + accepted.get(one, 0)
                start = self.draft_lengths[one]
                if reads and start < length:
                    tokens = self.all_tokens(one)[start:length]
                    chunks.append(DraftChunk(sequence_id=one, start=start, tokens=tokens))
                self.draft_lengths[one] = length + count + 1
        plan = super().plan(**fields)
        if counts is not None:
            self.verifying |= {one for one in decodes if counts.get(one, 0) > 0}
        return plan

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Finish a step and record the numbers of proposed and accepted drafts."""
        result = super().finish(launched)
        plan = launched.plan
        decoded = result.tokens[len(result.tokens) - len(plan.decodes) :]
        for one, tokens, count in zip(plan.decodes, decoded, plan.draft_counts, strict=False):
            assert 1 <= len(tokens) <= max(count, 0) + 1
            if count > 0:
                self.proposed_drafts += count
                self.accepted_drafts += len(tokens) - 1
                if one in self.verifying:
                    self.accepted[one] = len(tokens) - 1
        return result

    def check_rows(self) -> None:
        """Check that every draft row has the length that the plans give it."""
        proposer = self.executor.proposer
        if isinstance(proposer, DraftModelProposer):
            held = {one: proposer._store.length(slot) for one, slot in self._slots.items()}
            assert held == self.draft_lengths


def draft_model_of(model: nn.Module) -> LoadedDrafter:
    """Return `model` as a draft model."""
    return LoadedDrafter("draft_model", model)


def perturb_weights(model: Any, like: Any, scale: float) -> nn.Module:
    """Give `model` the weights of `like`, an equal architecture, with noise of relative size
    `scale`.
    """
    mx.random.seed(11)

    def shift(weight: mx.array) -> mx.array:
        spread = scale * mx.abs(weight).mean()
        return weight + spread * mx.random.normal(weight.shape)

    model.update(tree_map(shift, like.parameters()))
    mx.eval(model.parameters())
    result: nn.Module = model
    return result


def random_eagle_head(
    width: int = 48, *, seed: int = 3, layers: int = 1, bias: bool = False
) -> LoadedDrafter:
    """Return an EAGLE head with random weights for hidden states of this width."""
    head: Any = EagleHead(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=width,
            num_hidden_layers=layers,
            intermediate_size=2 * width,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-6,
            vocab_size=211,
        ),
        bias=bias,
    )
    mx.random.seed(seed)
    head.update(tree_map(lambda one: mx.random.normal(one.shape) * 0.2, head.parameters()))
    mx.eval(head.parameters())
    return LoadedDrafter("eagle", head)
