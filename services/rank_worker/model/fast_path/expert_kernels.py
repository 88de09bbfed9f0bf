"""Has kernels compute layers of routed experts for few tokens, in models of any form."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import SwiGLU, SwitchLinear

from services.rank_worker.device.description import DeviceKind
from services.rank_worker.model.fast_path.kernels.few_experts import FewExperts
from services.rank_worker.model.fast_path.kernels.tensor_cores import can_multiply
from services.rank_worker.model.fast_path.proof import relative_difference
from services.rank_worker.model.sharding.local_experts import LocalExperts, expert_layers

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_TOKENS, _EXPERTS_PER_TOKEN = 9, 2
"""Of the compared forward: more than one tile of rows."""


def open_expert_kernels(
    model: nn.Module, device: DeviceKind, all_agree: Callable[[bool], bool]
) -> str:
    """Have the layers of experts use kernels where these compute the same. Waits for the device.

    All ranks call this and vote, also one without layers of experts, as of a pipeline.

    Args:
        model: this rank's shard.
        device: kind of its device.
        all_agree: tells whether a statement holds on all ranks; a collective.

    Returns:
        How experts are computed, for operators; "": the device or the model has no kernels.
    """
    layers = expert_layers(model)
    kernels = FewExperts() if device == "cuda" else None
    fault = _find_fault(layers, kernels)
    agreed = all_agree(not fault)
    if kernels is None or not layers:
        return ""
    if not agreed:
        return f"mlx-lm's experts: {fault or 'another rank has no kernels'}"
    for _, local in layers:
        local.few = kernels
    return "experts with kernels"


def _find_fault(layers: list[tuple[nn.Module, LocalExperts]], kernels: FewExperts | None) -> str:
    """Compare the kernels with mlx-lm's code; return why they cannot serve, "" if they can."""
    if kernels is None:
        return "this device has no kernels" if layers else ""
    shapes = set()
    for number, (layer, local) in enumerate(layers):
        if not _is_known(layer):
            return "their form has no kernels"
        shape = (layer.gate_proj.weight.dtype, *(layer[one].weight.shape for one in _PROJECTIONS))
        # Layers of one shape are multiplied in one way.
        if shape in shapes:
            continue
        shapes.add(shape)
        try:
            differs = _compare(layer, local, kernels)
        except (RuntimeError, ValueError) as error:
            return f"a kernel does not run ({str(error).splitlines()[0]})"
        if differs:
            return f"layer {number} of experts differs by {differs:.1%}"
    return ""


def _is_known(layer: Any) -> bool:
    children = layer.children()
    return (
        set(children) - {"activation"} == set(_PROJECTIONS)
        and type(children.get("activation")) is SwiGLU
        and all(
            type(layer[name]) is SwitchLinear
            and "bias" not in layer[name]
            and can_multiply(layer[name].weight)
            and layer[name].weight.dtype == layer.gate_proj.weight.dtype
            for name in _PROJECTIONS
        )
    )


def _compare(layer: Any, local: LocalExperts, kernels: FewExperts) -> float:
    dim, dtype = layer.gate_proj.weight.shape[2], layer.gate_proj.weight.dtype
    # Both of a token's experts are local, so that mlx-lm's code can compute them.
    count = len(local.experts)
    chosen = mx.random.randint(0, count, (_TOKENS, _EXPERTS_PER_TOKEN), key=mx.random.key(1))
    x = mx.random.normal((_TOKENS, dim), key=mx.random.key(2)).astype(dtype)
    expected = local.run_plainly(layer, x, chosen)
    indices = (chosen + local.experts.start).astype(mx.uint32)
    found = kernels(layer, x, indices, local.experts)
    return relative_difference(expected, found, expected)
