"""Splits a model whose weights are not read yet: its modules keep slices of lazy parameters."""

from typing import Any

from mlx import nn

from services.rank_worker.collectives import Collectives
from services.rank_worker.sharding.split import Split
from shared.errors import ConfigError


def apply_split(
    model: nn.Module, config: dict[str, Any], split: Split, collectives: Collectives
) -> None:
    """Leave this rank's part of a model in place.

    Args:
        model: whole, its parameters lazy.
        config: the model's config.json.
        split: which part.
        collectives: the world.

    Raises:
        ConfigError: the model cannot be split so; what can be done instead.
    """
    if collectives.group is None:
        return
    name, size = config["model_type"], split.world_size
    if not hasattr(model, "shard"):
        raise ConfigError(
            f'Models of type "{name}" cannot be split over {size} ranks: set world.size to 1.'
        )
    try:
        model.shard(collectives.group)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"This model cannot be split over {size} ranks: {error}") from error
