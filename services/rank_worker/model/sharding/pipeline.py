"""Divides layers between ranks, through mlx-lm's own pipelines.

The last rank has the first layers; it sends what they give to the rank before it, and so on. Rank 0
gives what the last layers make to all, and each computes the head: embedding, norm and head are
whole on every rank.
"""

import inspect
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from services.rank_worker.collectives import Collectives
from services.rank_worker.model.sharding.shares import divide_layers
from shared.errors import ConfigError


def split_layers(model: nn.Module, weights: list[int], collectives: Collectives) -> str:
    """Keep this rank's layers.

    Args:
        model: whole, its parameters lazy.
        weights: how much each rank takes compared with the others; all alike: mlx-lm's own split.
        collectives: the world.

    Returns:
        How many layers each rank has, in words; equal on all ranks.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    holder = _holder(model)
    if holder is None:
        raise ConfigError(
            f"mlx-lm does not pipeline {type(model).__module__}: choose another world.sharding, or "
            "set world.size to 1."
        )
    layers: list[Any] = holder["layers"]
    if len(layers) < len(weights):
        raise ConfigError(
            f"The model has {len(layers)} layers: set world.size to {len(layers)} or less."
        )
    split = None
    if len(set(weights)) > 1 and "split" in inspect.signature(holder.pipeline).parameters:
        split = divide_layers([_numbers(layer) for layer in layers], weights)
    try:
        holder.pipeline(collectives.group, **({} if split is None else {"split": split}))
    except ValueError as error:
        raise ConfigError(
            f"The model's layers cannot be divided between {len(weights)} ranks: {error}."
        ) from error
    kept = list(getattr(model, "layers", []))
    if not kept or any(one is None for one in kept) or len(kept) >= len(layers):
        raise ConfigError(
            f"mlx-lm's {type(model).__module__} does not tell which layers of a pipeline are its "
            "own: choose another world.sharding."
        )
    return "even" if split is None else "+".join(map(str, split))


def _holder(model: nn.Module) -> Any | None:
    """Return the part of a model that has layers and can divide them."""
    for _, module in sorted(model.named_modules(), key=lambda one: len(one[0])):
        if hasattr(module, "pipeline") and isinstance(module.get("layers"), list):
            return module
    return None


def _numbers(layer: nn.Module) -> int:
    arrays: dict[str, mx.array] = dict(tree_flatten(layer.parameters()))
    return sum(array.size for array in arrays.values())
