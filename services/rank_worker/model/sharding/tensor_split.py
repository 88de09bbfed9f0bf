"""Divides matrices with mlx-lm's `shard`.

Routed experts are divided in the same way, or by number: then each rank keeps whole matrices of
some. No sum needs another place then: mlx-lm's blocks add up what the ranks' parts of the experts
return, and a rank's experts are such a part, because they return zeros for those of other ranks
(`local_experts`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx import nn

from services.rank_worker.model.sharding.expert_split import find_expert_layers, keep_share
from services.rank_worker.model.sharding.local_experts import is_switch
from services.rank_worker.peers.collectives import Collectives
from shared.errors import ConfigError
from shared.model.sharding.feasibility import sharding_obstacle


def split_tensors(model: nn.Module, config: dict[str, Any], collectives: Collectives) -> None:
    """Keep this rank's part of every matrix.

    Args:
        model: the whole model with lazy parameters; changed in place.
        config: the model's config.json.
        collectives: the world's collectives.

    Raises:
        ConfigError: when mlx-lm cannot shard the model over this number of ranks.
    """
    name, size = config["model_type"], collectives.world_size
    if not hasattr(model, "shard"):
        raise ConfigError(
            f'Models of type "{name}" cannot be split over {size} ranks by tensors: '
            f"set world.size to 1{_or_experts(config, size)}."
        )
    try:
        model.shard(collectives.group)
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        raise ConfigError(
            f"This model cannot be split over {size} ranks by tensors, because mlx-lm says "
            f'"{str(error).rstrip(".")}": set world.size to 1{_or_experts(config, size)}.'
        ) from error


def _or_experts(config: dict[str, Any], world_size: int) -> str:
    """Return an end of the remedy that names the split by experts, if it may work; else ""."""
    may_work = sharding_obstacle(config, "expert", world_size) is None
    return ', or world.sharding to "expert"' if may_work else ""


def split_tensors_and_experts(
    model: nn.Module,
    config: dict[str, Any],
    expert_weights: Sequence[int],
    collectives: Collectives,
) -> str:
    """Keep this rank's routed experts, and its part of every other matrix.

    Args:
        model: the whole model with lazy parameters; changed in place.
        config: the model's config.json.
        expert_weights: relative number of routed experts by rank, for example [2, 1].
        collectives: the world's collectives.

    Returns:
        The number of experts by rank, for example "64+64".

    Raises:
        ConfigError: when mlx-lm cannot shard the model over this number of ranks, or does not sum
            its experts over them, or when it has too few experts.
    """
    layers = find_expert_layers(model)
    with _left_whole([experts for experts, _ in layers]):
        split_tensors(model, config, collectives)
    for _, ancestors in layers:
        if all(getattr(one, "sharding_group", None) is None for one in ancestors):
            raise ConfigError(
                "mlx-lm does not sum the routed experts of this model over ranks: "
                'set world.sharding to "tensor" or "expert".'
            )
    texts = [keep_share(experts, expert_weights, collectives.rank) for experts, _ in layers]
    return ", ".join(dict.fromkeys(texts))


@contextmanager
def _left_whole(layers: Sequence[nn.Module]) -> Iterator[None]:
    """While the block runs, layers of experts have empty arrays, which `shard` leaves alone."""
    switches = [one for layer in layers for one in layer.children().values() if is_switch(one)]
    before = [
        {name: value for name, value in one.items() if isinstance(value, mx.array)}
        for one in switches
    ]
    for switch, arrays in zip(switches, before, strict=True):
        switch.update(dict.fromkeys(arrays, mx.zeros((0, 0))))
    try:
        yield
    finally:
        for switch, arrays in zip(switches, before, strict=True):
            switch.update(arrays)
