"""Whether a model can be split the asked way over N ranks, said from its config alone. No MLX.

What is said here is said before any weight is read and before any peer is awaited. It may let pass
what the built model then refuses (`apply.apply_split`); it refuses nothing that would work.
"""

from typing import Any

from services.rank_worker.model.sharding.divides import indivisible, listed
from services.rank_worker.model.sharding.families import family
from shared import limits
from shared.errors import ConfigError
from shared.messages.rank_link import Sharding
from shared.model.checkpoint_files import text_config

SPLITTINGS: tuple[Sharding, ...] = ("tensor", "expert", "pipeline")
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""What families call the number of their routed experts, per layer."""


def check_possible(config: dict[str, Any], sharding: Sharding, world_size: int) -> None:
    """Refuse a splitting that cannot be.

    Args:
        config: the model's config.json.
        sharding: how it is to be split.
        world_size: over how many ranks.

    Raises:
        ConfigError: what is in the way, and what is possible instead.
    """
    why = obstacle(config, sharding, world_size)
    if why is None:
        return
    sizes = listed([1, *possible_sizes(config, sharding)])
    others = [
        f'"{one}"'
        for one in SPLITTINGS
        if one != sharding and not obstacle(config, one, world_size)
    ]
    instead = f", or world.sharding to {' or '.join(others)}" if others else ""
    raise ConfigError(
        f"This model cannot be split over {world_size} ranks by {_noun(sharding)}, because {why}: "
        f"set world.size to {sizes}{instead}."
    )


def possible_sizes(config: dict[str, Any], sharding: Sharding) -> list[int]:
    """Return the world sizes from 2 on over which a model can be split this way."""
    sizes = range(2, limits.RANKS_MAX + 1)
    return [size for size in sizes if obstacle(config, sharding, size) is None]


def obstacle(config: dict[str, Any], sharding: Sharding, world_size: int) -> str | None:
    """Return what keeps a model from being split this way, in words; None: nothing known."""
    if world_size == 1:
        return None
    kind = family(config)
    name = config.get("model_type")
    match sharding:
        case "tensor":
            if kind is not None and not kind.shards:
                return f'mlx-lm does not shard models of type "{name}"'
            return indivisible(config, world_size)
        case "expert":
            count = experts(config)
            if not count or (kind is not None and not kind.has_experts):
                return "it has no routed experts"
            return f"it has {count} routed experts" if count < world_size else None
        case "pipeline":
            if kind is not None and not kind.pipelines:
                return f'mlx-lm does not pipeline models of type "{name}"'
            layers = text_config(config).get("num_hidden_layers")
            few = isinstance(layers, int) and layers < world_size
            return f"it has {layers} layers" if few else None
        case "none":
            return "one rank would have to hold it all"


def experts(config: dict[str, Any]) -> int:
    """Return how many routed experts a layer has, 0 if none; of unequal layers, the fewest."""
    facts = text_config(config)
    for name in EXPERT_COUNTS:
        value = facts.get(name)
        counts = value if isinstance(value, list) else [value]
        numbers = [one for one in counts if isinstance(one, int) and one > 1]
        if numbers:
            return min(numbers)
    return 0


def _noun(sharding: Sharding) -> str:
    return {"tensor": "tensors", "expert": "experts", "pipeline": "layers", "none": "nothing"}[
        sharding
    ]
