"""Recurrent state per row, from the tensors of layers without keys and values. No MLX.

State is counted in the precision of mlx-lm: gated delta rules and Mamba 2 in float32, Mamba 1 and
convolutions in the model's own type.
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
"""Families whose state is counted as mlx-lm stores it; a test compares them."""

UNPLANNED = frozenset(
    {"baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "gear", "iquestloopcoder", "kimi_k3"}
    | {"kimi_linear", "longcat_flash_ngram", "olmo_hybrid", "plamo2", "recurrent_gemma", "rwkv7"}
    | {"deepseek_v41", "llama4", "llama4_text", "prism_hadamard_qwen35"}
)
"""Families with state of another kind, whose size shapes do not show."""

_FLOAT32_BYTES = 4
_STATES = ("mamba_d_state", "ssm_state_size", "state_size", "mamba_state_dim")


def state_bytes(
    layer: Mapping[str, Tensor], facts: Mapping[str, Any], float_bytes: int
) -> int | None:
    """Return the bytes of one row's recurrent state in a layer.

    Args:
        layer: its tensors by name.
        facts: the language model's config.
        float_bytes: bytes of one floating-point number of the model.

    Returns:
        0 for a layer without such state; None if its size is unknown.
    """
    kernels = [tensor for name, tensor in layer.items() if _is_kernel(name)]
    heads = next((t for name, t in layer.items() if name.endswith("A_log")), None)
    if not kernels:
        return None if heads is not None else 0
    conv = sum((_width(kernel) - 1) * kernel.rows for kernel in kernels) * float_bytes
    if heads is None:
        # Only a gated convolution (LFM2).
        return conv
    if len(heads.shape) == 2:
        # Mamba 1: [width, states].
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
    """Return the size of a gated delta rule's state: value heads * value width * key width."""
    names = ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim")
    sizes = [facts.get(name) for name in names]
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known) if len(known) == len(names) else None


def _state_space(
    layer: Mapping[str, Tensor], facts: Mapping[str, Any], channels: int, heads: Tensor
) -> int | None:
    """Return the size of the state of Mamba 2: width * states."""
    states = next((facts[key] for key in _STATES if isinstance(facts.get(key), int)), None)
    entry = next((t for name, t in layer.items() if name.endswith("in_proj.weight")), None)
    if states is None or entry is None:
        return None
    # The input projection computes the gate, the convolution's channels and a step per head.
    width = entry.rows - channels - heads.rows
    return width * states if width > 0 else None
