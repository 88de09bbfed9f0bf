"""Divides a model's layers between ranks with mlx-lm's own pipelines.

The last rank has the first layers and sends their output to the rank before it, and so on. Rank 0
sends the output of the last layers to all ranks. Every rank holds the embedding, the final norm and
the head, and computes the logits.
"""

import inspect
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from services.rank_worker.peers.collectives import Collectives
from shared.errors import ConfigError
from shared.model.sharding.shares import divide_layers


def split_layers(model: nn.Module, weights: list[int], collectives: Collectives) -> str:
    """Keep only this rank's layers.

    Args:
        model: the whole model with lazy parameters; changed in place.
        weights: relative share of the layers by rank, for example [2, 1]; if all are equal, mlx-lm
            divides the layers itself.
        collectives: the world's collectives.

    Returns:
        The number of layers by rank as text, such as "21+11", or "even"; equal on all ranks.

    Raises:
        ConfigError: when the layers cannot be divided.
    """
    stack = find_layer_stack(model)
    if stack is None:
        raise ConfigError(
            f"mlx-lm does not pipeline {type(model).__module__}: choose another world.sharding, or "
            "set world.size to 1."
        )
    layers: list[Any] = stack["layers"]
    if len(layers) < len(weights):
        raise ConfigError(
            f"The model has {len(layers)} layers: set world.size to {len(layers)} or less."
        )
    split = None
    if len(set(weights)) > 1 and "split" in inspect.signature(stack.pipeline).parameters:
        split = divide_layers([_parameter_count(layer) for layer in layers], weights)
    try:
        stack.pipeline(collectives.group, **({} if split is None else {"split": split}))
    except ValueError as error:
        raise ConfigError(
            f"The model's layers cannot be divided between {len(weights)} ranks: {error}."
        ) from error
    kept = list(getattr(model, "layers", []))
    if not kept or any(one is None for one in kept) or len(kept) >= len(layers):
        raise ConfigError(
            f"mlx-lm's {type(model).__module__} does not say which layers of a pipeline belong to "
            "this rank: choose another world.sharding."
        )
    return "even" if split is None else "+".join(map(str, split))


def find_layer_stack(model: nn.Module) -> Any | None:
    """Return the module that holds the layers and can divide them; None without one."""
    for _, module in sorted(model.named_modules(), key=lambda one: len(one[0])):
        if hasattr(module, "pipeline") and isinstance(module.get("layers"), list):
            return module
    return None


def _parameter_count(layer: nn.Module) -> int:
    arrays: dict[str, mx.array] = dict(tree_flatten(layer.parameters()))
    return sum(array.size for array in arrays.values())
