"""The link between the scheduler and a rank worker, which reports facts and obeys orders."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared import limits
from shared.messages.base import (
    BlockHash,
    CanaryFinding,
    Count,
    Digest,
    Message,
    Milliseconds,
    Namespace,
    Sampling,
    Seconds,
    ShortText,
    TokenId,
    TokenLogprobs,
)

Backend = Literal["off", "ring", "nccl", "jaccl"]
Sharding = Literal["none", "tensor", "expert", "pipeline"]


class RankHello(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True):
    """Fact: a rank process is there and belongs to no world yet."""

    rank: Annotated[int, Meta(ge=-1, lt=limits.RANKS_MAX)]
    """The rank it was started as; -1: any."""
    host: ShortText
    pid: Count
    data_address: ShortText
    """host:port where this rank's collectives may listen (ring, nccl); "" when it was launched by
    others."""
    launched: bool
    """True when the environment already says rank and peers (mlx.launch): JoinWorld adds nothing to
    it."""
    device: ShortText
    mlx_version: ShortText
    memory_bytes: Count
    """Memory of the device that the rank may use."""
    fast_synch: Literal["unproven", "proven"] = "unproven"
    """`proven`: on this build of the operating system the canary has passed with Metal's fast
    synchronization."""


class JoinWorld(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True):
    """Order: become this rank of this epoch, load the model, report RankReady."""

    epoch: Annotated[int, Meta(ge=1)]
    rank: Annotated[int, Meta(ge=0, lt=limits.RANKS_MAX)]
    world_size: Annotated[int, Meta(ge=1, le=limits.RANKS_MAX)]
    backend: Backend
    sharding: Sharding = "none"
    """How the model is split; "none" for one rank."""
    memory_bytes: Annotated[list[Count], Meta(max_length=limits.RANKS_MAX)] = []
    """What each rank may use, by rank: unequal shares (layers, experts) follow from it alone. []:
    equal shares."""
    canary: bool = True
    """Before RankReady, known sums and a long prompt are computed and digested."""
    canary_prompt_s: Seconds = 0.0
    """How long the canary's next longer prompt may be expected to take; 0: by the device."""
    environment: dict[str, str]
    """Variables to set before MLX's distributed init."""
    files: dict[str, str]
    """Variable name -> content: written to a private file whose path the variable gets."""
    synchronization: Literal["broadcast", "verify"]
    """How ranks agree on sampled ids: rank 0's ids through an all_sum, or every rank samples
    itself."""
    receipt_logits: bool
    """Put the bits of each row's top logit into the digest (all devices alike)."""
    init_deadline_s: Seconds
    load_deadline_s: Seconds
    step_deadline_max_s: Seconds


class RankLoading(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Fact: how far this rank is in joining and loading."""

    stage: Literal["joining", "downloading", "loading", "warming"]
    loaded: Annotated[float, Meta(ge=0.0, le=1.0)]


class RankReady(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True):
    """Fact: this rank has its shard and can execute plans."""

    rank: Count
    model_fingerprint: ShortText
    """Equal on all ranks, or the world does not start. Behind a "+" the draft model's."""
    kv_bytes_per_token: Count
    """Bytes that one token of one row takes on this rank, all layers."""
    kv_bytes_per_row: Count
    """Bytes that one row takes whatever its length (recurrent state, sliding windows, the padding
    of an EAGLE head); 0 for plain KV alone."""
    kv_budget_bytes: Count
    """Bytes that rows may take on this rank."""
    context_tokens_max: Count
    """Longest sequence that the model was made for."""
    vocab_size: Count
    can_roll_back: bool
    """Rows can be shortened, so drafts can be verified."""
    needs_checkpoints: bool = False
    """Some layers keep state that cannot be cut into tokens: a row begins from blocks only where
    there is a checkpoint too. `kv_bytes_per_token` is then the blocks' size, `kv_bytes_per_row` a
    checkpoint's."""
    kv_layout: ShortText = ""
    """How block bytes are laid out on this rank (layers, heads, widths, types); part of the
    namespace. "": blocks cannot be kept."""
    draft_method: Literal["off", "ngram", "draft_model", "eagle"] = "off"
    """What this rank is set up for: who proposes drafts. The scheduler's must be the same."""
    draft_bytes_per_token: Count = 0
    """Bytes more that a token of a row takes on this rank for the draft model or head; 0 without
    one. Blocks do not hold it."""
    shard_bytes: Count = 0
    """Bytes of weights on this rank."""
    canary: Annotated[list[CanaryFinding], Meta(max_length=64)] = []
    """What it has computed with the others before it was ready."""
    blas: ShortText


class AdmittedSequence(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A sequence that enters the running batch, in full."""

    sequence_id: Count
    slot: Count
    tokens: Annotated[list[TokenId], Meta(min_length=1)]
    """Prompt ids, then ids generated before a preemption or a restart."""
    prompt_tokens: Count
    """How many of `tokens` are the prompt: penalties and draw positions tell the two apart."""
    sampling: Sampling
    reused_tokens: Count = 0
    """So many first tokens get their KV from blocks; prefill goes on behind them."""
    reused_blocks: Annotated[list[BlockHash], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)] = []
    """Resident blocks that hold them, in order from the first token on. Of the last one only a
    part may be used."""
    checkpoint: BlockHash | None = None
    """Resident checkpoint at `reused_tokens`, for ranks whose rows need one."""


class KeptBlock(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Tokens [start, start + length) of a row, to be kept as a resident block."""

    sequence_id: Count
    start: Count
    length: Annotated[int, Meta(ge=1, le=limits.BLOCK_TOKENS_MAX)]
    hash: BlockHash


class KeptCheckpoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A state that was set aside at `position` tokens, to be kept as a resident checkpoint."""

    sequence_id: Count
    position: Count
    hash: BlockHash


class AdoptedRestore(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """What becomes of a restore that all ranks have answered."""

    restore_id: Count
    count: Count
    """Its first so many items become resident; the rest, and with 0 everything, is forgotten."""


class SpillOrder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Resident blocks and checkpoints to write to the cache store, in the background."""

    namespace: Namespace
    hashes: Annotated[list[BlockHash], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)]
    evict_first: Annotated[list[BlockHash], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)] = []
    """Stored ones that the store gives up first, in this order, if it needs the room."""


class PrefillChunk(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Compute KV for tokens [start, start + length) of one admitted sequence."""

    sequence_id: Count
    start: Count
    length: Annotated[int, Meta(ge=1)]
    samples: bool
    """The chunk ends the known tokens, so its last position samples the next one."""


class DraftChunk(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The draft model reads these tokens of a sequence into its row, which holds `start` tokens."""

    sequence_id: Count
    start: Count
    tokens: Annotated[list[TokenId], Meta(min_length=1)]
    """Known ones only: of the prompt, or generated and reported."""


class RolledBack(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """What a row holds of the drafts that an earlier plan verified: the accepted ones only."""

    sequence_id: Count
    length: Count
    """Tokens that the row has from here on."""


class SlotMove(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Move one row to a free slot with a lower number, so that the batch has no tail of holes."""

    sequence_id: Count
    slot: Count
    """Where it goes."""


class StepPlan(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True):
    """Order: the complete work of one step. Applied in the order of the fields.

    A rank that has applied plans 1..n of an epoch is in one possible state. A decode's input token
    is the one that the sequence sampled last, on the device, so a plan can leave before that token
    is known here.
    """

    epoch: Annotated[int, Meta(ge=1)]
    step_id: Annotated[int, Meta(ge=1)]
    deadline_s: Seconds
    """The rank ends its process when it makes no progress for so long while executing this."""
    rolled_back: list[RolledBack] = []
    """Until it is named here, a row whose drafts were verified counts all of them; it is not
    decoded before."""
    keep_blocks: list[KeptBlock] = []
    """Copied out of the rows as the plans before this one leave them."""
    keep_checkpoints: list[KeptCheckpoint] = []
    adopted: list[AdoptedRestore] = []
    spill: SpillOrder | None = None
    dropped: list[Count] = []
    """Sequences that leave the batch; their slots are free from here on, what they set aside and
    nobody kept is forgotten."""
    evict_blocks: list[BlockHash] = []
    """Resident blocks and checkpoints to forget."""
    moves: list[SlotMove] = []
    row_count: Count
    """Rows that the KV arrays have from here on (slots 0 .. row_count - 1)."""
    row_tokens: Count
    """Tokens that each row has room for from here on."""
    admitted: list[AdmittedSequence] = []
    prefill_chunks: list[PrefillChunk] = []
    draft_chunks: list[DraftChunk] = []
    """Of the draft model alone; they come before the decodes of the same plan."""
    decodes: list[Count] = []
    """Sequence ids that decode one token, in slot order."""
    drafts: list[Annotated[list[TokenId], Meta(max_length=limits.DRAFT_TOKENS_MAX)]] = []
    """Empty, or per decode the drafts to verify: k drafts make it a row of k + 1 tokens. Every row
    that decodes has room for one more than the longest drafts of the plan."""
    draft_counts: list[Annotated[int, Meta(ge=-1, le=limits.DRAFT_TOKENS_MAX)]] = []
    """Empty, or per decode (and then `drafts` is empty) how many drafts the ranks' own draft model
    or head proposes and the step verifies. 0: none, but the draft row follows; -1: none, and the
    draft row stays behind. A draft row that follows holds as many tokens as the sequence's row, and
    is rolled back with it."""
    checkpoints: list[Count] = []
    """Sequences whose state as this step leaves it is set aside, under the length of its row. A
    sequence has at most one set aside: the latest."""


class StepFinished(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Fact and receipt: a step is computed. No token leaves before all ranks' digests agree."""

    epoch: Count
    step_id: Count
    rank: Count
    digest: Digest
    """Over the plans applied, slot order, lengths, sampled ids and, when asked, top-logit bits."""
    tokens: list[list[TokenId]] = []
    """Rank 0 only. Per sampling prefill chunk in plan order, then per decode in plan order: new
    tokens; of a decode with drafts those that were accepted, and one more."""
    logprobs: list[list[TokenLogprobs]] = []
    """Rank 0 only. Empty, or as `tokens` with an empty list where none were asked."""
    busy_ms: Milliseconds
    """From when this step could start on the device (start or end of the one before) to its end."""
    idle_ms: Milliseconds
    """How long the device had nothing queued before this step: the exposed cost of all the rest."""
    memory_bytes: Count


class RankFailed(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Fact: this rank's process ends now."""

    rank: Annotated[int, Meta(ge=-1, lt=limits.RANKS_MAX)]
    epoch: Count
    detail: ShortText
    permanent: bool
    """True when starting again cannot help (no such model, cannot be sharded): do not retry."""
    cause: Literal["error", "memory", "unavailable", "canary"] = "error"
    """`memory`: the device had none left, so the next epoch gets less. `unavailable`: a service
    elsewhere does not answer, or another rank cannot be reached, so it is tried again for as long
    as that takes. `canary`: what the ranks compute together before they serve is wrong here, so
    this world is not trusted."""


class Heartbeat(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True):
    """Fact: the progress of a rank. Being alive is not progress."""

    epoch: Count
    rank: Annotated[int, Meta(ge=-1, lt=limits.RANKS_MAX)]
    step_started: Count
    step_finished: Count


class RestoreItem(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One block of a prefix, and the checkpoint at its end where rows need one."""

    block: BlockHash | None
    """None: it is resident already, only the checkpoint is wanted."""
    length: Annotated[int, Meta(ge=1, le=limits.BLOCK_TOKENS_MAX)]
    """Tokens in the block."""
    checkpoint: BlockHash | None = None


class RestoreBlocks(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Order: read stored blocks, while steps go on; they become resident when a plan adopts them.

    Wanted is the longest usable prefix of the items: every block of it and, if the items name
    checkpoints, the checkpoint of its last item (only that one is read).
    """

    epoch: Annotated[int, Meta(ge=1)]
    restore_id: Count
    namespace: Namespace
    items: Annotated[
        list[RestoreItem], Meta(min_length=1, max_length=limits.BLOCKS_PER_MESSAGE_MAX)
    ]
    deadline_s: Seconds
    """Answer with what is there by then."""


class BlocksRestored(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Answer to RestoreBlocks: the first `count` items can be adopted on this rank."""

    epoch: Count
    rank: Count
    restore_id: Count
    count: Count
    stopped_by: Literal["", "absent", "unreadable", "late", "off", "full"]
    """Why not more; "" when all are there. `off`: there is no store, or it has switched itself off;
    `full`: too many restores at once."""
    bytes_read: Count
    read_ms: Milliseconds


class BlocksSpilled(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Fact: what became of blocks that a SpillOrder named. Every one is reported once."""

    epoch: Count
    rank: Count
    stored: Annotated[list[BlockHash], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)]
    """Committed by the store of this rank's host."""
    lost: Annotated[list[BlockHash], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)] = []
    """Not written: too much was waiting, no store, or the disk refused."""
    bytes_written: Count = 0
    write_ms: Milliseconds = 0.0
    store_bytes: Count = 0
    """Bytes that the store of this host holds now, all namespaces."""


class LeaveWorld(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Order: this epoch is over, end the process."""

    epoch: Count
    detail: ShortText
    cause: Literal["other", "canary"] = "other"
    """`canary`: what the ranks have computed together is wrong, so nobody takes it for a proof."""
