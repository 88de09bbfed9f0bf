"""Messages between the scheduler and a rank worker, apart from steps. Ranks report and obey."""

from typing import Annotated, Literal

from msgspec import Meta

from shared import limits
from shared.messages.base import (
    BlockHash,
    CanaryFinding,
    Count,
    Message,
    MessagePart,
    Milliseconds,
    Namespace,
    Seconds,
    Sharding,
    ShortText,
)
from shared.messages.telemetry.expert_counts import ExpertTotal, LayerAssignments
from shared.messages.telemetry.step_profile import StepProfile
from shared.messages.telemetry.step_times import STEP_BYTES

Backend = Literal["off", "ring", "nccl", "jaccl"]
VocabularySplit = Literal["auto", "off", "head", "all"]


class RankHello(Message, frozen=True, kw_only=True):
    """Fact: a rank process runs and belongs to no world yet."""

    rank: Annotated[int, Meta(ge=-1, lt=limits.RANKS_MAX)]
    """The rank number it was started with; -1: any."""
    host: ShortText
    pid: Count
    data_address: ShortText
    """host:port on which this rank's collectives may listen (ring, nccl); "" if another launcher
    started it."""
    launched: bool
    """Another launcher (mlx.launch) has set rank and peers in the environment, so JoinWorld adds
    none."""
    device: ShortText
    mlx_version: ShortText
    build: ShortText = ""
    """Version and digest of Lockstep's code that the process runs; "": unknown."""
    memory_bytes: Count
    """Device memory that the rank may use."""
    fast_synch: Literal["unproven", "proven"] = "unproven"
    """`proven`: the canary has passed with Metal's fast synchronization on this build of macOS."""
    spare: bool = False
    """It is the spare process of a rank whose own process still runs."""


class PlaceTaken(Message, frozen=True, kw_only=True):
    """Fact: the process of a rank has ended, and this spare process has its place now."""

    rank: Annotated[int, Meta(ge=-1, lt=limits.RANKS_MAX)]


class JoinWorld(Message, frozen=True, kw_only=True):
    """Order: become this rank of this epoch, load the model and report RankReady."""

    epoch: Annotated[int, Meta(ge=1)]
    rank: Annotated[int, Meta(ge=0, lt=limits.RANKS_MAX)]
    world_size: Annotated[int, Meta(ge=1, le=limits.RANKS_MAX)]
    backend: Backend
    sharding: Sharding = "none"
    """How the model is split; "none" for one rank."""
    memory_bytes: Annotated[list[Count], Meta(max_length=limits.RANKS_MAX)] = []
    """Memory that each rank may use, by rank. Unequal shares of layers and experts are derived from
    it. []: equal shares."""
    expert_shares: Annotated[list[ExpertTotal], Meta(max_length=limits.RANKS_MAX)] = []
    """Relative number of experts of each rank; []: derived from memory."""
    vocabulary: VocabularySplit = "off"
    """Which matrices with a row per token are divided by token ids: none, the head, or the head and
    the embedding. `auto`: the head, if it is large."""
    kv_budget_bytes: Count = 0
    """Memory for rows on this rank: a spare process gets that of the process whose place it will
    take. 0: the rank measures it."""
    experts_every_steps: Count = 0
    """Steps after which a rank reads its counts of assignments to experts; 0: it counts none."""
    canary: bool = True
    """Run the canary before RankReady: known sums and a long prompt, with digests."""
    canary_prompt: bool = True
    """The canary has its long prompt; not where it has passed within the hour."""
    canary_prompt_s: Seconds = 0.0
    """Longest predicted time of a canary prompt; 0: depends on the device."""
    environment: dict[str, str]
    """Variables to set before MLX's distributed init."""
    files: dict[str, str]
    """Variable name -> content of a private file, whose path becomes the variable's value."""
    synchronization: Literal["broadcast", "independent"]
    """How ranks agree on sampled ids: all receive rank 0's ids through an all_sum, or every rank
    samples independently."""
    receipt_logits: bool
    """Include the bits of each row's highest logit in the digest. Requires equal devices."""
    init_deadline_s: Seconds
    load_deadline_s: Seconds
    step_deadline_max_s: Seconds
    silence_s: Annotated[float, Meta(ge=1.0, le=limits.PEER_SILENCE_MAX_S)] = limits.PEER_SILENCE_S
    """Silence of the scheduler after which the rank ends its process, as the scheduler does with
    the rank."""


class RankLoading(Message, frozen=True, kw_only=True):
    """Fact: how far this rank has come in joining the world and loading its shard."""

    stage: Literal["joining", "init", "downloading", "loading", "warming"]
    """`init`: inside MLX's init, where the process may not be able to send anything."""
    loaded: Annotated[float, Meta(ge=0.0, le=1.0)]


class RankReady(Message, frozen=True, kw_only=True):
    """Fact: this rank has loaded its shard and can execute plans."""

    rank: Count
    model_fingerprint: ShortText
    """Must be equal on all ranks. With a draft model, "+" and its fingerprint follow."""
    kv_bytes_per_token: Count
    """Bytes per token of one row on this rank, over all layers."""
    kv_bytes_per_row: Count
    """Bytes per row independent of its length (recurrent state, sliding windows, padding of an
    EAGLE head); 0 for plain KV."""
    kv_budget_bytes: Count
    """Memory for rows on this rank."""
    context_tokens_max: Count
    """The model's longest sequence."""
    vocab_size: Count
    can_roll_back: bool
    """Rows can be shortened, which verifying drafts requires."""
    needs_checkpoints: bool = False
    """Some layers have state that cannot be cut at a token, so a row can start from blocks only
    with a checkpoint. `kv_bytes_per_token` is then the size of blocks and `kv_bytes_per_row` of
    checkpoints."""
    kv_layout: ShortText = ""
    """Layout of block bytes on this rank (layers, heads, widths, types); part of the namespace. "":
    blocks cannot be kept."""
    draft_method: Literal["off", "ngram", "draft_model", "eagle"] = "off"
    """The drafting method that this rank is set up for. Must equal the scheduler's."""
    batch_invariant: bool = False
    """Its decodes of a sequence do not depend on other sequences. Must equal the scheduler's
    setting."""
    prefill_tokens: Count = 0
    """Length of a prompt that the rank has timed; 0: none, the scheduler begins with short
    chunks."""
    prefill_ms: Milliseconds = 0.0
    """The time of its prefill."""
    draft_bytes_per_token: Count = 0
    """Additional bytes per token of a row for the draft model or head; 0 without one. Not part of
    blocks."""
    shard_bytes: Count = 0
    """Bytes of weights on this rank."""
    share: ShortText = ""
    """Which part of the model it holds, in words."""
    layers: ShortText = ""
    """How it computes the model's layers, in words."""
    canary: Annotated[list[CanaryFinding], Meta(max_length=64)] = []
    """Results of its canary."""
    blas: ShortText


class GrammarCompiled(Message, frozen=True, kw_only=True):
    """Fact: a rank has compiled the grammar of an admitted sequence, or cannot.

    Grammars are compiled beside the steps. A plan samples the sequence once all ranks have
    reported, so that no step waits for a grammar.
    """

    epoch: Count
    rank: Count
    step_id: Count
    """The plan that admitted the sequence."""
    sequence_id: Count
    failure: ShortText = ""
    """Why it cannot, one sentence; "": it has."""


class RankFailed(Message, frozen=True, kw_only=True):
    """Fact: this rank's process has failed and is about to end, which ends the epoch."""

    rank: Annotated[int, Meta(ge=-1, lt=limits.RANKS_MAX)]
    epoch: Count
    detail: ShortText
    permanent: bool
    """A restart cannot help, for example if the model does not exist or cannot be sharded."""
    cause: Literal["error", "memory", "unavailable", "canary", "peer"] = "error"
    """`memory`: the device had none left, so the next epoch gets less. `unavailable`: a remote
    service or another rank cannot be reached, so starts are repeated without limit. `canary`: the
    canary's results were wrong, so this world must not serve. `peer`: another rank has ended, and
    only that one knows why."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Fact, sent once a second: ids of the latest steps that a rank has started and finished."""

    epoch: Count
    rank: Annotated[int, Meta(ge=-1, lt=limits.RANKS_MAX)]
    step_started: Count
    step_finished: Count


class HeadExchanges(MessagePart, frozen=True, kw_only=True):
    """How a rank has sampled from a divided head since its last report; 0 where it is whole."""

    candidate_steps: Count = 0
    """Steps sampled from candidates of each rank."""
    gathered_steps: Count = 0
    """Steps for which the ranks gathered all logits."""
    sent_bytes: Count = 0
    """Bytes of logits or candidates that this rank has given to exchanges."""


class StepsMeasured(Message, frozen=True, kw_only=True):
    """Fact: what a rank has measured in its last steps. No decision depends on it.

    Sent with the heartbeat if steps have finished since the last one, or counts of experts are due.
    """

    epoch: Count
    rank: Count
    first_step_id: Count
    """Id of the first step; the ids of the others follow it without gaps."""
    origin_s: Seconds
    """A time on the rank's monotonic clock, from which `times` count."""
    times: Annotated[bytes, Meta(max_length=limits.STEPS_PER_MESSAGE_MAX * STEP_BYTES)]
    """The times of each step (`step_times.pack`)."""
    profiles: Annotated[list[StepProfile], Meta(max_length=limits.PROFILES_PER_MESSAGE_MAX)] = []
    """Of the steps that were measured part by part."""
    experts: Annotated[list[LayerAssignments], Meta(max_length=limits.LAYERS_MAX)] = []
    """New assignments to this rank's experts, by layer; [] if they are not due yet."""
    head: HeadExchanges = HeadExchanges()
    """How steps were sampled if the ranks divide the head."""
    active_bytes: Count
    """Memory that MLX's arrays use on this rank, after the last step."""
    peak_bytes: Count
    """The most memory that they have used since the rank started."""
    cached_bytes: Count
    """Freed memory that MLX keeps for new arrays."""

    def __post_init__(self) -> None:
        """Refuse bytes that are not the times of a whole number of steps."""
        if len(self.times) % STEP_BYTES:
            raise ValueError(f"Times of a step have {STEP_BYTES} bytes")


class RestoreItem(MessagePart, frozen=True, kw_only=True):
    """One stored block of a prompt's prefix to read, and the checkpoint at its end if needed."""

    block: BlockHash | None
    """None: the block is resident already and only the checkpoint is needed."""
    length: Annotated[int, Meta(ge=1, le=limits.BLOCK_TOKENS_MAX)]
    """Tokens in the block."""
    checkpoint: BlockHash | None = None


class RestoreBlocks(Message, frozen=True, kw_only=True):
    """Order: read stored blocks while steps continue. A StepPlan with AdoptedRestore uses them.

    The rank restores the longest usable prefix of the items: all its blocks and, if the items name
    checkpoints, the checkpoint of its last item only.
    """

    epoch: Annotated[int, Meta(ge=1)]
    restore_id: Count
    namespace: Namespace
    items: Annotated[
        list[RestoreItem], Meta(min_length=1, max_length=limits.BLOCKS_PER_MESSAGE_MAX)
    ]
    deadline_s: Seconds
    """Time after which the rank reports the items read so far."""


class BlocksRestored(Message, frozen=True, kw_only=True):
    """Answer to RestoreBlocks: this rank has read the first `count` items and can use them."""

    epoch: Count
    rank: Count
    restore_id: Count
    count: Count
    stopped_by: Literal["", "absent", "unreadable", "late", "off", "full"]
    """Why there are not more; "" if all were restored. `off`: no store, or it is switched off.
    `full`: too many restores at once."""
    bytes_read: Count
    read_ms: Milliseconds


class BlocksSpilled(Message, frozen=True, kw_only=True):
    """Fact: which blocks of a SpillOrder are stored or lost. Every block is reported once."""

    epoch: Count
    rank: Count
    stored: Annotated[list[BlockHash], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)]
    """Committed by this host's store."""
    lost: Annotated[list[BlockHash], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)] = []
    """Not written: too much data was waiting, there is no store, or writing failed."""
    bytes_written: Count = 0
    write_ms: Milliseconds = 0.0
    store_bytes: Count = 0
    """Bytes in this host's store now, over all namespaces."""


class LeaveWorld(Message, frozen=True, kw_only=True):
    """Order: the epoch has ended, so this rank must end its process."""

    epoch: Count
    detail: ShortText
    cause: Literal["other", "canary"] = "other"
    """`canary`: the canary's results were wrong, so no rank may record this start as a proof."""
