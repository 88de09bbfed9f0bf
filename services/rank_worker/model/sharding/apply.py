"""Reduces a lazy model to one rank's part. Reads no weights."""

import re
from typing import Any

from mlx import nn

from services.rank_worker.model.sharding.expert_split import split_experts
from services.rank_worker.model.sharding.head_split import HeadSplit
from services.rank_worker.model.sharding.layer_split import find_layer_stack, split_layers
from services.rank_worker.model.sharding.tensor_split import (
    split_tensors,
    split_tensors_and_experts,
)
from services.rank_worker.peers.collectives import Collectives
from shared.model.sharding.feasibility import check_sharding
from shared.model.sharding.shares import Split, item_range, rank_weights


def apply_split(
    model: nn.Module, config: dict[str, Any], split: Split, collectives: Collectives
) -> str:
    """Reduce a model to this rank's part in place.

    Args:
        model: the whole model with lazy parameters.
        config: the model's config.json.
        split: the way of sharding, this rank, and the memory of each rank, which determines its
            share unless shares of experts are given.
        collectives: the world's collectives.

    Returns:
        A description of the sharding and of each rank's share, equal on all ranks. It is part of
        the model fingerprint, so stored blocks of another split are never used.

    Raises:
        ConfigError: when the model cannot be split this way; names the alternatives.
    """
    if collectives.group is None:
        return "none"
    check_sharding(config, split.sharding, split.world_size)
    weights = rank_weights(split.memory_bytes, split.world_size)
    match split.sharding:
        case "expert":
            return f"expert {split_experts(model, weights, collectives, split.expert_weights())}"
        case "pipeline":
            return f"pipeline {split_layers(model, weights, collectives)}"
        case "tensor+expert":
            shares = split_tensors_and_experts(model, config, split.expert_weights(), collectives)
            return f"tensor+expert {shares}"
        case _:
            split_tensors(model, config, collectives)
            return "tensor"


def describe_share(
    model: nn.Module, sharding: str, split: Split, head: HeadSplit | None = None
) -> str:
    """Return which part of the model this rank holds, in words.

    Args:
        model: the model after `apply_split`.
        sharding: what that has returned.
        split: the way of sharding, and this rank.
        head: the division of the head; None: it is whole.
    """
    layers = _describe_layers(model, sharding, split)
    return f"{layers}, {head.description}" if head is not None else layers


def _describe_layers(model: nn.Module, sharding: str, split: Split) -> str:
    kind, _, shares = sharding.partition(" ")
    part = f"part {split.rank + 1} of {split.world_size} of every layer"
    match kind:
        case "tensor":
            return part
        case "expert":
            return _describe_experts(shares, split.rank)
        case "tensor+expert":
            return f"{part}, {_describe_experts(shares, split.rank)}"
        case "pipeline":
            stack: Any = find_layer_stack(model)
            return f"layers {stack.start_idx} to {stack.end_idx - 1}"
        case _:
            return "the whole model"


def _describe_experts(shares: str, rank: int) -> str:
    counts = [int(one) for one in re.split(r"[,;]", shares)[0].split("+")]
    first, stop = item_range(counts, rank)
    return f"experts {first} to {stop - 1} of {sum(counts)}"
