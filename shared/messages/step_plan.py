"""Messages of one step: the plan that every rank executes, and the receipt of each rank."""

from typing import Annotated, Literal

from msgspec import Meta

from shared import limits
from shared.messages.base import (
    BlockHash,
    Count,
    Digest,
    Grammar,
    GrammarFailure,
    Message,
    MessagePart,
    Milliseconds,
    Namespace,
    Sampling,
    Seconds,
    ShortText,
    TokenId,
    TokenLogprobs,
)


class AdmittedSequence(MessagePart, frozen=True, kw_only=True):
    """A sequence that enters the running batch: its tokens, sampling and blocks to start from."""

    sequence_id: Count
    slot: Count
    tokens: Annotated[list[TokenId], Meta(min_length=1)]
    """Prompt ids, followed by ids generated before a preemption or restart."""
    prompt_tokens: Count
    """Length of the prompt within `tokens`. Penalties and sampling positions depend on it."""
    sampling: Sampling
    grammar: Grammar | None = None
    """What the completion must match. The tokens after the prompt have matched it already. The rank
    answers with GrammarCompiled."""
    tenant: ShortText = ""
    """Whose sequence it is. Tenants take turns where a rank compiles grammars."""
    reused_tokens: Count = 0
    """Number of leading tokens whose KV comes from blocks; prefill starts after them."""
    reused_blocks: Annotated[list[BlockHash], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)] = []
    """Resident blocks of these tokens, in order. Of the last one a part may be used."""
    checkpoint: BlockHash | None = None
    """Resident checkpoint at `reused_tokens`, for ranks that need one."""


class KeptBlock(MessagePart, frozen=True, kw_only=True):
    """Part of a StepPlan: keep tokens [start, start + length) of a row as a resident block."""

    sequence_id: Count
    start: Count
    length: Annotated[int, Meta(ge=1, le=limits.BLOCK_TOKENS_MAX)]
    hash: BlockHash


class KeptCheckpoint(MessagePart, frozen=True, kw_only=True):
    """Part of a StepPlan: keep the state saved when a row had `position` tokens as a checkpoint."""

    sequence_id: Count
    position: Count
    hash: BlockHash


class AdoptedRestore(MessagePart, frozen=True, kw_only=True):
    """Part of a StepPlan: make the blocks that every rank has read for a restore resident.

    The scheduler sends it to every rank in the same plan, once all have answered RestoreBlocks, so
    that the same blocks become resident everywhere.
    """

    restore_id: Count
    count: Count
    """The first `count` items of RestoreBlocks become resident; a rank drops the others that it has
    read. 0: it drops all."""


class SpillOrder(MessagePart, frozen=True, kw_only=True):
    """Part of a StepPlan: write resident blocks and checkpoints to the store in the background."""

    namespace: Namespace
    hashes: Annotated[list[BlockHash], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)]
    evict_first: Annotated[list[BlockHash], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)] = []
    """Stored blocks that the store evicts first, in this order, if it needs space."""


class PrefillChunk(MessagePart, frozen=True, kw_only=True):
    """Part of a StepPlan: compute KV for tokens [start, start + length) of an admitted sequence."""

    sequence_id: Count
    start: Count
    length: Annotated[int, Meta(ge=1)]
    samples: bool
    """The chunk ends the known tokens, so the next token is sampled at its last position."""


class DraftChunk(MessagePart, frozen=True, kw_only=True):
    """Part of a StepPlan: tokens of a sequence whose KV the draft model computes for itself.

    The draft model's own row of the sequence has `start` tokens before.
    """

    sequence_id: Count
    start: Count
    tokens: Annotated[list[TokenId], Meta(min_length=1)]
    """Known tokens only: from the prompt, or generated and reported."""


class RolledBack(MessagePart, frozen=True, kw_only=True):
    """Part of a StepPlan: cut a row with verified drafts, so that only accepted ones remain."""

    sequence_id: Count
    length: Count
    """Tokens in the row from now on."""


class SlotMove(MessagePart, frozen=True, kw_only=True):
    """Part of a StepPlan: move a row to a lower free slot, which closes a gap between rows."""

    sequence_id: Count
    slot: Count
    """The new slot."""


class StepPlan(Message, frozen=True, kw_only=True):
    """Order: the complete work of one step. Its fields are applied in their order.

    A rank that has applied plans 1..n of an epoch is in exactly one possible state. The input of a
    decode is the sequence's latest sampled token, which is on the device, so a plan can be sent
    before the scheduler knows that token.
    """

    epoch: Annotated[int, Meta(ge=1)]
    step_id: Annotated[int, Meta(ge=1)]
    deadline_s: Seconds
    """The rank ends its process after this time without progress in the step."""
    rolled_back: list[RolledBack] = []
    """A row with verified drafts counts all of them until it is listed here, and is not decoded
    before."""
    keep_blocks: list[KeptBlock] = []
    """Copied from the rows in the state after the previous plans."""
    keep_checkpoints: list[KeptCheckpoint] = []
    adopted: list[AdoptedRestore] = []
    spill: SpillOrder | None = None
    dropped: list[Count] = []
    """Sequences that leave the batch. Their slots become free and their saved states are
    deleted."""
    evict_blocks: list[BlockHash] = []
    """Resident blocks and checkpoints to delete."""
    moves: list[SlotMove] = []
    row_count: Count
    """Number of rows of the KV arrays from now on (slots 0 .. row_count - 1)."""
    row_tokens: Count
    """Capacity of each row in tokens from now on."""
    admitted: list[AdmittedSequence] = []
    prefill_chunks: list[PrefillChunk] = []
    draft_chunks: list[DraftChunk] = []
    """For the draft model only; processed before the decodes of this plan."""
    decodes: list[Count] = []
    """Sequence ids that decode one token, in slot order."""
    drafts: list[Annotated[list[TokenId], Meta(max_length=limits.DRAFT_TOKENS_MAX)]] = []
    """[], or the drafts to verify per decode: with k drafts the row reads k + 1 tokens. Every
    decoding row has capacity for one token more than the plan's longest drafts."""
    draft_counts: list[Annotated[int, Meta(ge=-1, le=limits.DRAFT_TOKENS_MAX)]] = []
    """[], or per decode (with `drafts` empty) how many drafts the rank's own draft model or head
    proposes for verification. 0: none, but the draft row is extended; -1: none, and it is not. An
    extended draft row has as many tokens as the sequence's row and is rolled back with it."""
    profile: Literal["", "times", "primitives"] = ""
    """Measure this step part by part, once all earlier steps have ended; `primitives`: count
    operations too. The tokens are the same."""
    checkpoints: list[Count] = []
    """Sequences whose state after this step is saved, under the length of their rows. Only the
    latest saved state of a sequence exists."""


class StepFinished(Message, frozen=True, kw_only=True):
    """Fact and receipt: a rank has finished a step.

    The scheduler sends the step's tokens to gateways once the digests of all ranks agree.
    """

    epoch: Count
    step_id: Count
    rank: Count
    digest: Digest
    """Covers the applied plans, slot order, lengths, sampled ids, masks of grammars and, if
    requested, top-logit bits."""
    tokens: list[list[TokenId]] = []
    """Rank 0 only. New tokens per sampling prefill chunk, then per decode, in plan order. A decode
    with drafts has the accepted ones and one more."""
    logprobs: list[list[TokenLogprobs]] = []
    """Rank 0 only. [], or as `tokens`, with [] for sequences that requested none."""
    grammar_failures: list[GrammarFailure] = []
    """Rank 0 only. Sequences of this step whose grammar can be matched no further, at most once
    each. Their tokens of this step were drawn without a mask."""
    busy_ms: Milliseconds
    """Time from the step's earliest possible start on the device (its start, or the end of the
    previous step) to its end."""
    idle_ms: Milliseconds
    """Time for which the device had no queued work before this step: the exposed scheduling
    cost."""
    memory_bytes: Count
