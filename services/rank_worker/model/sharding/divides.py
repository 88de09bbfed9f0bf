"""Whether heads and widths can be divided by N ranks, said from the config alone. No MLX."""

from typing import Any

from shared import limits
from shared.errors import ConfigError
from shared.model.checkpoint_files import quantization, text_config

HEADS = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
KEY_VALUE_HEADS = "num_key_value_heads"
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def check_divides(config: dict[str, Any], world_size: int) -> None:
    """Refuse a world that the model's heads or widths cannot be divided by.

    Raises:
        ConfigError: names the number, and the world sizes that do work.
    """
    why = indivisible(config, world_size)
    if why is None:
        return
    sizes = [n for n in range(1, limits.RANKS_MAX + 1) if indivisible(config, n) is None]
    raise ConfigError(
        f"This model cannot be split over {world_size} ranks, because {why}: "
        f"set world.size to {listed(sizes)}."
    )


def indivisible(config: dict[str, Any], world_size: int) -> str | None:
    """Return which head count or width N ranks do not divide; None: they divide all."""
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


def listed(numbers: list[int]) -> str:
    """Return rising numbers in words; three or more neighbours as a range: "1, 2 or 4-64"."""
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
