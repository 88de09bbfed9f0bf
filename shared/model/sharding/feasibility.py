"""Checks whether a model can be split over N ranks, from its config alone. No MLX.

These checks run before any weight is read and before any peer connects. They may accept a model
that is refused when it is built (`apply_split` in the rank worker), but never refuse one that
works, unless its config has the width of a matrix that it does not have.
"""

from collections.abc import Sequence
from typing import Any

from shared import limits
from shared.errors import ConfigError
from shared.messages.base import Sharding
from shared.model.checkpoint_files import quantization, text_config
from shared.model.sharding.families import model_family

SHARDINGS: dict[Sharding, str] = {
    "tensor": "tensors",
    "expert": "experts",
    "tensor+expert": "tensors and experts",
    "pipeline": "layers",
}
"""Ways of splitting a model -> the parts that each rank gets."""
EXPERT_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Config keys that hold the number of routed experts per layer, by family."""

HEAD_COUNT_KEYS = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
KV_HEAD_COUNT_KEY = "num_key_value_heads"
WIDTH_KEYS = ("intermediate_size", "dense_intermediate_size", "moe_intermediate_size")
"""Config keys that hold the widths of MLPs and of routed experts."""
SHARED_WIDTH_KEYS = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)
SHARED_COUNT_KEYS = ("n_shared_experts", "num_shared_experts")
"""Config keys that hold the number of shared experts, which form one of that many times a routed
expert's width where no key of SHARED_WIDTH_KEYS holds theirs."""


def check_sharding(config: dict[str, Any], sharding: Sharding, world_size: int) -> None:
    """Raise if the model cannot be split this way, as `sharding_obstacle` finds.

    Args:
        config: the model's config.json.
        sharding: what each rank gets, for example a part of every matrix, or some experts.
        world_size: number of ranks.

    Raises:
        ConfigError: when the model cannot be split so; names the cause and possible alternatives.
    """
    obstacle = sharding_obstacle(config, sharding, world_size)
    if obstacle is None:
        return
    sizes = list_numbers([1, *possible_world_sizes(config, sharding)])
    others = [
        f'"{one}"'
        for one in SHARDINGS
        if one != sharding and not sharding_obstacle(config, one, world_size)
    ]
    parts = SHARDINGS.get(sharding, "nothing")
    alternatives = f", or world.sharding to {' or '.join(others)}" if others else ""
    raise ConfigError(
        f"This model cannot be split over {world_size} ranks by {parts}, because "
        f"{obstacle}: set world.size to {sizes}{alternatives}."
    )


def possible_world_sizes(config: dict[str, Any], sharding: Sharding) -> list[int]:
    """Return the world sizes of at least 2 over which the model can be split this way."""
    sizes = range(2, limits.RANKS_MAX + 1)
    return [size for size in sizes if sharding_obstacle(config, sharding, size) is None]


def sharding_obstacle(config: dict[str, Any], sharding: Sharding, world_size: int) -> str | None:
    """Return why the model cannot be split this way; None when no reason is known.

    "tensor": mlx-lm must shard the model's type, and heads and widths must be divisible. "expert":
    at least one routed expert per rank. "tensor+expert": both, but any width of routed experts;
    that of shared experts must be divisible.
    "pipeline": mlx-lm must pipeline the type, and there must be at least one layer per rank.

    Args:
        config: the model's config.json.
        sharding: how to split.
        world_size: number of ranks.

    Returns:
        A clause, for example "it has 4 layers".
    """
    if world_size == 1:
        return None
    match sharding:
        case "tensor":
            return _tensor_obstacle(config, sharding, world_size)
        case "expert":
            return _expert_obstacle(config, world_size)
        case "tensor+expert":
            tensors = _tensor_obstacle(config, sharding, world_size)
            return _expert_obstacle(config, world_size) or tensors
        case "pipeline":
            return _pipeline_obstacle(config, world_size)
        case "none":
            return "one rank would have to hold it all"


def _expert_obstacle(config: dict[str, Any], world_size: int) -> str | None:
    family, count = model_family(config), expert_count(config)
    if not count or (family is not None and not family.has_experts):
        return "it has no routed experts"
    return f"it has {count} routed experts" if count < world_size else None


def _pipeline_obstacle(config: dict[str, Any], world_size: int) -> str | None:
    family = model_family(config)
    if family is not None and not family.pipelines:
        return f'mlx-lm does not pipeline models of type "{config.get("model_type")}"'
    layers = text_config(config).get("num_hidden_layers")
    has_too_few = isinstance(layers, int) and layers < world_size
    return f"it has {layers} layers" if has_too_few else None


def _tensor_obstacle(config: dict[str, Any], sharding: Sharding, world_size: int) -> str | None:
    """Return which head count or width cannot be divided by `world_size`; None when all can.

    A rank's part of a quantized width must also be a multiple of the quantization's group size.
    """
    family, text = model_family(config), text_config(config)
    if family is not None and not family.shards:
        return f'mlx-lm does not shard models of type "{config.get("model_type")}"'
    keys = list(HEAD_COUNT_KEYS)
    # With compressed KV (MLA) every rank holds the whole KV, so its head count does not matter.
    if not text.get("kv_lora_rank"):
        keys.append(KV_HEAD_COUNT_KEY)
    widths = _divided_widths(text, sharding)
    for name, number in (*_numbers(text, keys).items(), *widths.items()):
        if number % world_size:
            return f"its {name} is {number}"
    group = quantization(config).get("group_size")
    for name, width in widths.items():
        if isinstance(group, int) and width // world_size % group:
            return f"its {name} is {width}, quantized in groups of {group}"
    return None


def _divided_widths(text: dict[str, Any], sharding: Sharding) -> dict[str, int]:
    """Return the widths of which each rank gets a part, by name."""
    widths = _numbers(text, WIDTH_KEYS)
    routed = widths.get("moe_intermediate_size", 0)
    count = max(_numbers(text, SHARED_COUNT_KEYS).values(), default=0)
    own = {name: width for name, width in _numbers(text, SHARED_WIDTH_KEYS).items() if width}
    shared = own or {"shared experts' width": count * routed}
    if sharding == "tensor+expert":
        # Without a width of their own, routed experts have that of the model's MLPs.
        widths.pop("moe_intermediate_size" if routed else "intermediate_size", None)
    return widths | shared


def _numbers(text: dict[str, Any], keys: Sequence[str]) -> dict[str, int]:
    """Return the values of those keys that have an integer."""
    return {key: text[key] for key in keys if isinstance(text.get(key), int)}


def expert_count(config: dict[str, Any]) -> int:
    """Return the number of routed experts of the layer with fewest; 0 without experts."""
    text = text_config(config)
    for key in EXPERT_COUNT_KEYS:
        value = text.get(key)
        counts = value if isinstance(value, list) else [value]
        numbers = [one for one in counts if isinstance(one, int) and one > 1]
        if numbers:
            return min(numbers)
    return 0


def list_numbers(numbers: list[int]) -> str:
    """Return rising numbers as text, three or more neighbours as a range: "1, 2 or 4-64"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(one) for one in run]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
