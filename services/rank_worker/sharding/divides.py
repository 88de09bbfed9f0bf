"""Whether a model can be split over N ranks, said from its config alone. No MLX."""

from typing import Any

from services.rank_worker.model_files import quantization, text_config
from shared import limits
from shared.errors import ConfigError

HEADS = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
KEY_VALUE_HEADS = "num_key_value_heads"
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def check_divides(config: dict[str, Any], world_size: int) -> None:
    """Refuse a world that the model's heads or widths cannot be divided by.

    Raises:
        ConfigError: names the number, and the world sizes that do work.
    """
    obstacle = _obstacle(config, world_size)
    if obstacle is None:
        return
    sizes = [n for n in range(1, limits.RANKS_MAX + 1) if _obstacle(config, n) is None]
    raise ConfigError(
        f"This model cannot be split over {world_size} ranks, because {obstacle}: "
        f"set world.size to {_list(sizes)}."
    )


def _obstacle(config: dict[str, Any], world_size: int) -> str | None:
    facts = text_config(config)
    names = list(HEADS)
    # With compressed KV (MLA) every rank holds all of it, whatever this number says.
    if not facts.get("kv_lora_rank"):
        names.append(KEY_VALUE_HEADS)
    for name in (*names, *WIDTHS):
        value = facts.get(name)
        if isinstance(value, int) and value % world_size:
            return f"its {name} is {value}"
    group = quantization(config).get("group_size")
    for name in WIDTHS:
        value = facts.get(name)
        if isinstance(value, int) and isinstance(group, int) and value // world_size % group:
            return f"its {name} is {value}, quantized in groups of {group}"
    return None


def _list(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
