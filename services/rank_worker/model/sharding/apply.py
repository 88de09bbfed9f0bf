"""Splits a model whose weights are not read yet: its modules keep slices of lazy parameters."""

from typing import Any

from mlx import nn

from services.rank_worker.collectives import Collectives
from services.rank_worker.model.sharding.expert import split_experts
from services.rank_worker.model.sharding.pipeline import split_layers
from services.rank_worker.model.sharding.possible import check_possible
from services.rank_worker.model.sharding.shares import weights_of
from services.rank_worker.model.sharding.split import Split
from shared.errors import ConfigError


def apply_split(
    model: nn.Module, config: dict[str, Any], split: Split, collectives: Collectives
) -> str:
    """Leave this rank's part of a model in place.

    Args:
        model: whole, its parameters lazy.
        config: the model's config.json.
        split: which part.
        collectives: the world.

    Returns:
        How the model is split, in words: the splitting and each rank's share. Equal on all ranks;
        a part of the model fingerprint, so that blocks of another split are not found.

    Raises:
        ConfigError: the model cannot be split so; what can be done instead.
    """
    if collectives.group is None:
        return "none"
    check_possible(config, split.sharding, split.world_size)
    weights = weights_of(split.memory_bytes, split.world_size)
    match split.sharding:
        case "expert":
            return f"expert {split_experts(model, weights, collectives)}"
        case "pipeline":
            return f"pipeline {split_layers(model, weights, collectives)}"
        case _:
            _shard_tensors(model, config, collectives)
            return "tensor"


def _shard_tensors(model: nn.Module, config: dict[str, Any], collectives: Collectives) -> None:
    name, size = config["model_type"], collectives.world_size
    if not hasattr(model, "shard"):
        raise ConfigError(
            f'Models of type "{name}" cannot be split over {size} ranks: set world.size to 1.'
        )
    try:
        model.shard(collectives.group)
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        raise ConfigError(f"This model cannot be split over {size} ranks: {error}") from error
