"""Has kernels compute layers of routed experts for few tokens, in models of any form."""

import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchLinear

from services.rank_worker.device.description import DeviceKind
from services.rank_worker.model.expert_counter import ExpertCounter
from services.rank_worker.model.fast_path.comparison import relative_difference
from services.rank_worker.model.fast_path.kernels.expert_counts import ExpertCounts
from services.rank_worker.model.fast_path.kernels.faults import first_line
from services.rank_worker.model.fast_path.kernels.few_experts import (
    PROJECTIONS,
    FewExperts,
    tokens_dtype,
)
from services.rank_worker.model.fast_path.kernels.kernels import Kernels
from services.rank_worker.model.fast_path.kernels.matrices import matrix_of
from services.rank_worker.model.fast_path.kernels.routing import (
    EXPERTS_MAX,
    TOP_MAX,
    RoutingKernels,
    RoutingRule,
)
from services.rank_worker.model.fast_path.kernels.tensor_cores import multiplies
from services.rank_worker.model.fast_path.routed_block import (
    BlockForm,
    RoutedBlock,
    call_without_sum,
    has_expert_layer,
    read_block,
    use_kernels,
)
from services.rank_worker.model.sharding.local_experts import LocalExperts, expert_layers
from shared.log import Log

_log = Log("rank_worker.fast_path")

_TOKENS, _EXPERTS_PER_TOKEN = 9, 2
"""Of the compared forward: more than one tile of rows."""
_ROUTED_TOKENS, _CLEAR_TOKENS = 64, 16
"""Tokens that a block is given, and those of them that are compared: the most clearly routed."""
_LOGITS_SPREAD, _LEAST_SPREAD = 2.0, 0.02
"""Standard deviation that these tokens' logits are given, and the least one that they may have had
for it."""
_RULES = tuple(itertools.product((False, True), (True, False)))
"""Whether scores are sigmoids, and whether weights are divided by the sum of the chosen ones."""


def open_expert_kernels(
    model: nn.Module,
    device: DeviceKind,
    all_agree: Callable[[bool], bool],
    counter: ExpertCounter | None = None,
) -> str:
    """Have the layers of experts use kernels where these compute the same. Waits for the device.

    Where also the blocks around them are of a known form, kernels route their tokens.
    All ranks call this and vote, also one without layers of experts, as of a pipeline.

    Args:
        model: this rank's shard.
        device: kind of its device.
        all_agree: tells whether a statement holds on all ranks; a collective.
        counter: of the assignments to experts; gets a kernel as well. None: they are not counted.

    Returns:
        How experts are computed, for operators; "": the device or the model has no kernels.
    """
    layers = expert_layers(model)
    # A rank without layers of experts, as of a pipeline, has no objection.
    if not all_agree(device != "cpu" or not layers):
        return "mlx-lm's experts: another rank has no kernels" if device != "cpu" else ""
    dtype = _activation_dtype(model)
    fault = _open_products(layers, device, dtype, all_agree)
    # With logits of 32 bits on some ranks only, ranks would choose different experts.
    has_wide_logits = all_agree(device == "cuda" or not layers)
    blocks = [one for one in model.modules() if has_expert_layer(one)] if layers else []
    routed, fits, obstacle = _try_rules(blocks, device, dtype, has_wide_logits=has_wide_logits)
    # A rank whose experts were hardly chosen cannot tell rules apart, so all vote on each.
    agreed = [all_agree(one) for one in fits]
    if not layers:
        return ""
    if not any(agreed):
        reason = obstacle or "another rank has no kernels"
        products = f"mlx-lm's experts: {fault}" if fault else "experts with kernels"
        return f"{products}, mlx-lm's routing: {reason}"
    for block, one in zip(blocks, routed, strict=True):
        one.rule = RoutingRule(one.rule.top, *_RULES[agreed.index(True)])
        use_kernels(block, one)
    if counter is not None and blocks and device == "cuda":
        counter.kernel = _open_counts(len(blocks))
    if fault:
        return f"routing with kernels, mlx-lm's experts: {fault}"
    return "experts and routing with kernels"


def _activation_dtype(model: nn.Module) -> mx.Dtype:
    """Return the dtype of hidden states, which is that of the norms, of any kind."""
    norms = (one for one in model.modules() if "Norm" in type(one).__name__ and "weight" in one)
    return next((one["weight"].dtype for one in norms), mx.float32)


def _open_products(
    layers: list[tuple[nn.Module, LocalExperts]],
    device: DeviceKind,
    dtype: mx.Dtype,
    all_agree: Callable[[bool], bool],
) -> str:
    """Have kernels multiply the experts, where they can on all ranks; return why not, or ""."""
    kernels = FewExperts() if device == "cuda" and layers else None
    fault = _find_fault(layers, kernels, dtype)
    if not all_agree(not fault):
        return fault or "another rank has no kernels"
    for _, local in layers:
        local.few = kernels
    return ""


def _find_fault(
    layers: list[tuple[nn.Module, LocalExperts]], kernels: FewExperts | None, dtype: mx.Dtype
) -> str:
    """Compare the kernels with mlx-lm's code; return why they cannot serve, "" if they can.

    Args:
        layers: layers of experts, and what computes them.
        kernels: compute them too, if the device has any.
        dtype: of hidden states.
    """
    if kernels is None:
        return "this device has no kernels for their products" if layers else ""
    shapes = set()
    for number, (layer, local) in enumerate(layers):
        if not _is_known(layer, dtype):
            return "their form has no kernels"
        matrices = [matrix_of(layer[name]) for name in PROJECTIONS]
        shape = str([(one.weight.shape, one.dtype, one.constants) for one in matrices])
        # Layers of one shape are multiplied in one way.
        if shape in shapes:
            continue
        shapes.add(shape)
        try:
            differs = _compare(layer, local, kernels, dtype)
        except (RuntimeError, ValueError) as error:
            return f"a kernel does not run ({first_line(error)})"
        if differs:
            return f"layer {number} of experts differs by {differs:.1%}"
    return ""


def _is_known(layer: Any, dtype: mx.Dtype) -> bool:
    children = layer.children()
    if set(children) - {"activation"} != set(PROJECTIONS):
        return False
    modules = [layer[name] for name in PROJECTIONS]
    if type(children.get("activation")) is not SwiGLU or not all(map(_is_known_switch, modules)):
        return False
    gate, up, down = map(matrix_of, modules)
    of_tokens = tokens_dtype(layer) or dtype
    return (
        all(one.can_multiply and (one.dtype or of_tokens) == of_tokens for one in (gate, up, down))
        and (type(gate), gate.constants) == (type(up), up.constants)
        and multiplies(of_tokens)
    )


def _is_known_switch(module: Any) -> bool:
    is_known = type(module) in (SwitchLinear, QuantizedSwitchLinear) and "bias" not in module
    return is_known and getattr(module, "global_scale", None) is None


def _compare(layer: Any, local: LocalExperts, kernels: FewExperts, hidden_dtype: mx.Dtype) -> float:
    dim, dtype = layer.gate_proj.input_dims, tokens_dtype(layer) or hidden_dtype
    # Both of a token's experts are local, so that mlx-lm's code can compute them.
    count = len(local.experts)
    chosen = mx.random.randint(0, count, (_TOKENS, _EXPERTS_PER_TOKEN), key=mx.random.key(1))
    x = mx.random.normal((_TOKENS, dim), key=mx.random.key(2)).astype(dtype)
    expected = local.run_plainly(layer, x, chosen)
    indices = (chosen + local.experts.start).astype(mx.uint32)
    found = kernels(layer, x, indices, local.experts)
    return relative_difference(expected, found, expected)


def _try_rules(
    blocks: list[nn.Module], device: DeviceKind, dtype: mx.Dtype, *, has_wide_logits: bool
) -> tuple[list[RoutedBlock], list[bool], str]:
    """Try all rules for all blocks.

    Args:
        blocks: those around the layers of experts.
        device: kind of the device.
        dtype: of hidden states.
        has_wide_logits: the routers' logits may have 32 bits.

    Returns:
        (what computes the blocks, whether each rule holds for all, why none does).
    """
    routed: list[RoutedBlock] = []
    fits, no_fits = [True] * len(_RULES), [False] * len(_RULES)
    if not blocks or device == "cpu":
        return routed, fits, ""
    routing, kernels = RoutingKernels(device), Kernels(device)
    if not has_wide_logits:
        kernels.few_rows = None
    for number, block in enumerate(blocks):
        try:
            form = read_block(block)
            if form is None:
                return [], no_fits, "the block around them has no kernels"
            routed.append(RoutedBlock(form, routing, kernels))
            found = _find_rules(block, form, routed[-1], dtype)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            return [], no_fits, f"a kernel does not run ({first_line(error)})"
        fits = [one and other for one, other in zip(fits, found, strict=True)]
        if not any(fits):
            return [], no_fits, f"block {number} chooses in another way"
    return routed, fits, ""


def _find_rules(
    block: nn.Module, form: BlockForm, routed: RoutedBlock, dtype: mx.Dtype
) -> list[bool]:
    """Return for each rule whether the block computes with it what mlx-lm's code does."""
    shape = (_ROUTED_TOKENS, form.experts.gate_proj.input_dims)
    x = mx.random.normal(shape, key=mx.random.key(1)).astype(dtype)
    # For logits that are nearly equal, softmax and sigmoid give nearly the same weights.
    spread = mx.maximum(mx.std(form.logits(x).astype(mx.float32)), _LEAST_SPREAD)
    x = (x * (_LOGITS_SPREAD / spread)).astype(dtype)
    expected = call_without_sum(block, x[:, None])[:, 0]
    mx.eval(x, expected)
    top = form.local.experts_per_token
    if top > TOP_MAX or form.local.total > EXPERTS_MAX:
        return [False] * len(_RULES)
    found = []
    for rule in _RULES:
        routed.rule = RoutingRule(top, *rule)
        clear = _clearly_routed(form, routed.rule, x)
        whole, wanted = routed.compute_own(x[clear]), expected[clear]
        experts = routed.compute_own(x[clear], with_shared=False).astype(mx.float32)
        # A difference is compared with the experts' part: that of shared ones may be much larger.
        other = experts + (wanted.astype(mx.float32) - whole.astype(mx.float32))
        found.append(not relative_difference(other, experts, wanted))
    return found


def _clearly_routed(form: BlockForm, rule: RoutingRule, x: mx.array) -> mx.array:
    """Return the tokens whose last chosen expert is clearest, integer [_CLEAR_TOKENS].

    Between two experts with equal scores kernels and mlx-lm may choose differently.

    Args:
        form: of the block.
        rule: how it may choose.
        x: [tokens, dim].
    """
    logits = form.logits(x).astype(mx.float32)
    scores = mx.sigmoid(logits) if rule.is_sigmoid else mx.softmax(logits, axis=-1)
    if form.bias is not None:
        scores = scores + form.bias
    ordered = mx.sort(scores, axis=-1)
    if rule.top == ordered.shape[-1]:
        return mx.arange(_CLEAR_TOKENS)
    last = ordered[:, -rule.top]
    gaps = (last - ordered[:, -rule.top - 1]) / mx.abs(last)
    return mx.argsort(-gaps)[:_CLEAR_TOKENS]


def _open_counts(layers: int) -> ExpertCounts | None:
    """Return the kernel that counts assignments of some layers, if it counts two tokens rightly."""
    kernel, experts = ExpertCounts(), mx.array([[0, 2], [2, 5]], dtype=mx.int32)
    noted = [(layer, experts) for layer in range(layers)]
    try:
        counts = kernel.add(mx.ones((3 * layers + 3,), dtype=mx.uint32), 3, noted, None)
        return kernel if counts.tolist() == [2, 1, 4] * layers + [1] * 3 else None
    except (RuntimeError, ValueError) as error:
        _log.info("no_kernel_counts", detail=first_line(error))
        return None
