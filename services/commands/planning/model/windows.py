"""Layers with a sliding window, as mlx-lm's families define them. No MLX.

A config may name a window that its family in mlx-lm does not use, so families are listed here; a
test compares the list with the installed mlx-lm.
"""

from collections.abc import Callable, Mapping
from typing import Any

Facts = Mapping[str, Any]
Rule = Callable[[Facts, int], bool]
"""Returns whether the layer with this index has a window."""
_SLIDING, _FULL = "sliding_attention", "full_attention"


def windows(model_type: str, facts: Facts, layer_count: int) -> list[int | None]:
    """Return the sliding window of each layer, as mlx-lm would set it.

    Args:
        model_type: family of the model, as mlx-lm names it.
        facts: the language model's config.
        layer_count: number of layers.

    Returns:
        Per layer the number of last tokens that it stores; None: it stores all tokens.
    """
    rule = WINDOWED.get(ALIASES.get(model_type, model_type))
    if rule is None:
        return [None] * layer_count
    is_sliding, key, default = rule
    size = facts.get(key) or default
    return [int(size) if is_sliding(facts, index) else None for index in range(layer_count)]


def _typed(period: int = 0) -> Rule:
    """Take the type of each layer from the config; without types each `period`-th has no window."""

    def is_sliding(facts: Facts, index: int) -> bool:
        types = facts.get("layer_types")
        if isinstance(types, list) and index < len(types):
            return bool(types[index] != _FULL if period else types[index] == _SLIDING)
        return bool(period) and (index + 1) % period != 0

    return is_sliding


def _every(default: int) -> Rule:
    """Give every n-th layer no window, with n from the config or `default`."""

    def is_sliding(facts: Facts, index: int) -> bool:
        period = facts.get("sliding_window_pattern") or default
        return (index + 1) % int(period) != 0

    return is_sliding


def _patterned(facts: Facts, index: int) -> bool:
    """Follow a repeated string such as LLLG, in which L is a layer with a window."""
    pattern = facts.get("sliding_window_pattern")
    return isinstance(pattern, str) and bool(pattern) and pattern[index % len(pattern)] == "L"


def _gemma4(facts: Facts, index: int) -> bool:
    if facts.get("layer_types"):
        return _typed(1)(facts, index)
    return _every(5)(facts, index)


def _step(facts: Facts, index: int) -> bool:
    return _typed()(facts, index) if facts.get("layer_types") else index % 2 == 0


def _marked(facts: Facts, index: int) -> bool:
    pattern = facts.get("hybrid_layer_pattern") or []
    return index < len(pattern) and pattern[index] == 1


def _listed(facts: Facts, index: int) -> bool:
    return index in (facts.get("sliding_window_layers") or [])


WINDOWED: dict[str, tuple[Rule, str, int]] = {
    "afmoe": (_typed(), "sliding_window", 2_048),
    "baichuan_m1": (_listed, "sliding_window", 8_192),
    "cohere2": (_every(4), "sliding_window", 4_096),
    "exaone4": (_patterned, "sliding_window", 4_096),
    "exaone_moe": (_typed(), "sliding_window", 128),
    "gear": (_typed(), "sliding_window", 512),
    "gemma3_text": (_every(6), "sliding_window", 512),
    "gemma3n": (_typed(), "sliding_window", 512),
    "gemma4_text": (_gemma4, "sliding_window", 512),
    "gpt_oss": (_typed(2), "sliding_window", 128),
    "laguna": (_typed(), "sliding_window", 512),
    "llama": (_typed(), "sliding_window", 4_096),
    "mellum": (_typed(1), "sliding_window", 4_096),
    "mimo_v2_flash": (_marked, "sliding_window_size", 128),
    "ministral3": (_typed(), "sliding_window", 4_096),
    "muse_glimmer": (_typed(), "sliding_window", 512),
    "muse_spark": (_typed(), "sliding_window", 512),
    "olmo3": (_typed(4), "sliding_window", 4_096),
    "plamo3": (_every(8), "sliding_window", 2_048),
    "recurrent_gemma": (lambda *_: True, "attention_window_size", 2_048),
    "spark2_5": (_typed(4), "sliding_window", 512),
    "step3p5": (_step, "sliding_window", 512),
}
"""Family -> (rule for layers, config key of the window, window without that key)."""

ALIASES = {
    "mistral": "llama", "iquestcoder": "llama", "xverse": "llama", "gemma3": "gemma3_text",
    "gemma4": "gemma4_text", "gemma4_unified": "gemma4_text", "gemma4_unified_text": "gemma4_text",
    "muse_spark_text": "muse_spark",
}  # fmt: skip
"""Names of one family, as mlx-lm maps them."""
