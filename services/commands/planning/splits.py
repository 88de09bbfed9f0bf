"""Splits of a model over 1 to N ranks. Owns the memory that each rank would need. Pure."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from services.commands.planning.budget import KVRoom, row_length
from services.commands.planning.hosts import RankMemory
from services.commands.planning.model.checkpoint import Checkpoint
from services.commands.planning.model.kv import KVBytes, ModelKV
from services.commands.planning.model.parts import Part, whole_and_divided
from services.commands.planning.report import RankShare, SplitOption
from shared.configuration.setting_rules import pipeline_obstacle
from shared.messages.base import Sharding
from shared.messages.rank_link import VocabularySplit
from shared.model.sharding import shares
from shared.model.sharding.feasibility import SHARDINGS, expert_count, sharding_obstacle
from shared.model.sharding.shares import DIVIDES_MATRICES, Split


@dataclasses.dataclass(frozen=True, slots=True)
class DraftMemory:
    """Bytes of a draft model on each rank; every rank holds all of it. All 0: no draft model."""

    weights_bytes: int = 0
    kv_bytes_per_token: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryDemand:
    """Sequences that must fit into memory at once, and the settings that determine their bytes."""

    context_tokens: int
    """Length of each sequence."""
    sequences: int
    """Number of sequences."""
    kv_bits: int
    """Bits per number of stored KV, 4 or 8; 0: not quantized."""
    kv_row_growth_tokens: int
    """Tokens by which rows grow."""
    kv_bytes_max: int = 0
    """`rank_worker.kv_bytes_max`; 0: no such limit."""
    weight_copies: int = 1
    """Processes that hold the weights of each rank; 2 with loaded spare processes."""
    backend: str = ""
    """Backend of the ranks' collectives; "": not decided."""
    vocabulary: VocabularySplit = "auto"
    """`world.split_vocabulary`."""
    expert_shares: Sequence[int] = ()
    """`world.expert_shares`; with another number of ranks, experts follow memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedModel:
    """Model to plan memory for, as its config and headers describe it."""

    checkpoint: Checkpoint
    kv: ModelKV
    draft: DraftMemory = DraftMemory()
    """Memory of its draft model, if it has one."""


def all_splits(
    model: PlannedModel, memory: Sequence[RankMemory], asked: MemoryDemand
) -> list[SplitOption]:
    """Plan every sharding over 1 to `len(memory)` ranks.

    Args:
        model: the model.
        memory: memory of each rank that may be used; fewer ranks use those with most memory.
        asked: the sequences that must fit.

    Returns:
        One option per number of ranks and sharding, impossible ones included.
    """
    found: list[SplitOption] = []
    for ranks in range(1, len(memory) + 1):
        kinds: Iterable[Sharding] = SHARDINGS if ranks > 1 else ("none",)
        found += [plan_split(model, one, richest(memory, ranks), asked) for one in kinds]
    return found


def richest(memory: Sequence[RankMemory], ranks: int) -> Sequence[RankMemory]:
    """Return the `ranks` elements with most usable memory; all of them stay in their order."""
    if ranks == len(memory):
        return memory
    return sorted(memory, key=lambda one: -one.usable_bytes)[:ranks]


def plan_split(
    model: PlannedModel, sharding: Sharding, memory: Sequence[RankMemory], asked: MemoryDemand
) -> SplitOption:
    """Compute each rank's memory under one sharding.

    Args:
        model: the model.
        sharding: how the model is divided.
        memory: memory of each rank, in order of ranks.
        asked: the sequences that must fit.

    Returns:
        The memory of each rank, or the reason why this sharding is impossible.
    """
    ranks = len(memory)
    why = sharding_obstacle(model.checkpoint.config, sharding, ranks)
    if sharding == "pipeline" and not why:
        why = pipeline_obstacle(asked.backend)
    if why:
        return SplitOption(ranks=ranks, sharding=sharding, obstacle=why)
    parts = rank_parts(model, sharding, memory, asked)
    tokens = row_length(asked.context_tokens, asked.kv_row_growth_tokens)
    short = [part.room.short_bytes(asked.sequences, tokens) for part in parts]
    found = [
        RankShare(
            host=place.host,
            whole_bytes=part.whole_bytes,
            divided_bytes=part.own_bytes,
            kv_bytes_per_token=part.kv.per_token + part.room.draft_bytes_per_token,
            kv_bytes_per_row=part.kv.per_row,
            usable_bytes=place.usable_bytes,
            kv_budget_bytes=part.room.budget_bytes,
            reserve_bytes=part.room.reserve_bytes,
            short_bytes=missing,
        )
        for place, part, missing in zip(memory, parts, short, strict=True)
    ]
    return SplitOption(
        ranks=ranks,
        sharding=sharding,
        fits=not any(short),
        short_bytes=max(short),
        context_tokens=min(part.room.longest(asked.kv_row_growth_tokens) for part in parts),
        shares=found,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class RankPart:
    """Weights and KV of one rank under a sharding, and the memory that is left for KV rows."""

    whole_bytes: int
    """Weights that every rank holds in full, including the draft model."""
    own_bytes: int
    """Its part of the divided weights."""
    kv: KVBytes
    """KV that this rank stores."""
    room: KVRoom
    """Memory for KV rows, each as large as on the rank that stores most."""


def rank_parts(
    model: PlannedModel, sharding: Sharding, memory: Sequence[RankMemory], asked: MemoryDemand
) -> list[RankPart]:
    """Compute each rank's weights, KV and memory for KV rows under one sharding.

    Args:
        model: the model.
        sharding: how the model is divided; it must be possible.
        memory: memory of each rank, in order of ranks.
        asked: number and length of its sequences are not used.

    Returns:
        One element per rank.
    """
    usable, size = [place.usable_bytes for place in memory], len(memory)
    experts = asked.expert_shares if len(asked.expert_shares) == size else ()
    held = [
        _held(model, Split(sharding, rank, size, usable, experts, asked.vocabulary), asked.kv_bits)
        for rank in range(size)
    ]
    # All ranks have rows of one shape, and the scheduler counts them by the rank that stores most.
    counted = KVBytes(max(kv.per_token for *_, kv in held), max(kv.per_row for *_, kv in held))
    per_token, limit = model.draft.kv_bytes_per_token, asked.kv_bytes_max
    parts = []
    for free, (whole, own, kv) in zip(usable, held, strict=True):
        beside = free - (asked.weight_copies - 1) * (whole + own)
        room = KVRoom(beside, whole + own, counted, per_token, limit)
        parts.append(RankPart(whole, own, kv, room))
    return parts


def _held(model: PlannedModel, split: Split, kv_bits: int) -> tuple[int, int, KVBytes]:
    """Return a rank's bytes of undivided weights and of its part of the others, and its KV."""
    if split.sharding == "pipeline":
        return _pipeline(model, split, kv_bits)
    parts = whole_and_divided(model.checkpoint, split.sharding, split.vocabulary)
    ranks = split.world_size if split.sharding in DIVIDES_MATRICES else 1
    own = parts["tensor"] // split.world_size + _experts(model, parts, split)
    kv = model.kv.bytes(ranks=ranks, bits=kv_bits)
    return parts["whole"] + model.draft.weights_bytes, own, kv


def _experts(model: PlannedModel, parts: Mapping[Part, int], split: Split) -> int:
    """Return a rank's bytes of routed experts."""
    if not parts["experts"]:
        return 0
    count = expert_count(model.checkpoint.config)
    return parts["experts"] * shares.divide(count, split.expert_weights())[split.rank] // count


def _pipeline(model: PlannedModel, split: Split, kv_bits: int) -> tuple[int, int, KVBytes]:
    """Return undivided bytes, a rank's own bytes and its KV; the last rank has the first layers."""
    layers = model.checkpoint.layers
    outer = sum(tensor.bytes for tensor in model.checkpoint.outer.values())
    weights = shares.rank_weights(split.memory_bytes, split.world_size)
    if len(set(weights)) == 1:
        # As mlx-lm divides layers: the low ranks get the extra ones.
        base, extra = divmod(len(layers), split.world_size)
        counts = [base + (rank < extra) for rank in range(split.world_size)]
    else:
        numbers = [sum(math.prod(one.shape) for one in layer.values()) for layer in layers]
        counts = shares.divide_layers(numbers, weights)
    first = sum(counts[split.rank + 1 :])
    last = first + counts[split.rank]
    own = sum(tensor.bytes for layer in layers[first:last] for tensor in layer.values())
    kv = model.kv.bytes(bits=kv_bits, first=first, last=last)
    return outer + model.draft.weights_bytes, own, kv
