"""Recurrent state per row, read off the tensors of layers without keys and values. No MLX.

State is counted in the precision in which mlx-lm keeps it: gated delta rules and the second Mamba
in float32, the first Mamba and convolutions as the model computes.
"""

import math
from collections.abc import Mapping
from typing import Any

from services.commands.planning.model.checkpoint import Tensor

RECURRENT = frozenset(
    {"bailing_moe_v3", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba"}
    | {"mamba2", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"}
    | {"qwen3_next"}
)
"""Families whose state is counted as mlx-lm keeps it; a test compares."""

UNPLANNED = frozenset(
    {"baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "gear", "iquestloopcoder", "kimi_k3"}
    | {"kimi_linear", "longcat_flash_ngram", "olmo_hybrid", "plamo2", "recurrent_gemma", "rwkv7"}
    | {"deepseek_v41", "llama4", "llama4_text", "prism_hadamard_qwen35"}
)
"""Families that keep state of a kind of their own, of which shapes do not tell the size."""

_FLOAT32_BYTES = 4
_STATES = ("mamba_d_state", "ssm_state_size", "state_size", "mamba_state_dim")


def state_bytes(
    layer: Mapping[str, Tensor], facts: Mapping[str, Any], float_bytes: int
) -> int | None:
    """Return the bytes of one row's recurrent state in a layer; None: Lockstep does not know.

    Args:
        layer: its tensors by name.
        facts: the language model's config.
        float_bytes: bytes of a number that the model computes with.

    Returns:
        0 for a layer that has no such state.
    """
    kernels = [tensor for name, tensor in layer.items() if _is_kernel(name)]
    heads = next((t for name, t in layer.items() if name.endswith("A_log")), None)
    if not kernels:
        return None if heads is not None else 0
    conv = sum((_width(kernel) - 1) * kernel.rows for kernel in kernels) * float_bytes
    if heads is None:
        # A gated convolution and nothing else (LFM2).
        return conv
    if len(heads.shape) == 2:
        # The first Mamba: [width, states].
        return conv + math.prod(heads.shape) * float_bytes
    if any("linear_attn" in name for name in layer):
        state = _gated_delta(facts)
    else:
        state = _state_space(layer, facts, kernels[0].rows, heads)
    return None if state is None else conv + state * _FLOAT32_BYTES


def _is_kernel(name: str) -> bool:
    return name.endswith(("conv1d.weight", "conv.conv.weight"))


def _width(kernel: Tensor) -> int:
    """Return the taps of a depthwise convolution: [channels, taps, 1] or [channels, 1, taps]."""
    return math.prod(kernel.shape[1:])


def _gated_delta(facts: Mapping[str, Any]) -> int | None:
    """Return the numbers of a gated delta rule's state: value heads * value width * key width."""
    names = ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim")
    sizes = [facts.get(name) for name in names]
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known) if len(known) == len(names) else None


def _state_space(
    layer: Mapping[str, Tensor], facts: Mapping[str, Any], channels: int, heads: Tensor
) -> int | None:
    """Return the numbers of a second Mamba's state: width * states."""
    states = next((facts[key] for key in _STATES if isinstance(facts.get(key), int)), None)
    entry = next((t for name, t in layer.items() if name.endswith("in_proj.weight")), None)
    if states is None or entry is None:
        return None
    # The entry makes the gate, the convolution's channels and a step per head.
    width = entry.rows - channels - heads.rows
    return width * states if width > 0 else None
