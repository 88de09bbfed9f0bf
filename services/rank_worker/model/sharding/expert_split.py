"""Divides routed experts between ranks; the rest of the model stays whole on every rank.

Expert layers are found by their structure (a module with several matrices per expert), because
about forty families of mlx-lm use different names. Their outputs are zero for the experts of other
ranks (`local_experts`), so one sum over ranks completes them. The sum is placed:

- inside the block, if mlx-lm's own code has a `sharding_group` and uses it only for a sum;
- after the block, if everything that follows the experts in it is linear;
- directly after the experts otherwise: always correct, but with k times as many numbers.

In the first two cases shared experts are divided too, because the sum is needed anyway. Dense
layers stay whole, because dividing them would add a sum per layer.
"""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from services.rank_worker.model.sharding.local_experts import is_expert_layer, is_switch, keep_local
from services.rank_worker.model.sharding.mlp_split import can_divide, divide_mlp, is_linear, is_mlp
from services.rank_worker.peers.collectives import Collectives
from shared.errors import ConfigError
from shared.model.sharding.shares import divide, item_range

SUM_FUNCTIONS = {"all_sum", "sum_gradients"}
"""Functions that a block may pass its group to."""


def split_experts(
    model: nn.Module,
    weights: list[int],
    collectives: Collectives,
    expert_weights: Sequence[int] = (),
) -> str:
    """Keep only this rank's experts in each layer, and sum the layers' outputs over ranks.

    Args:
        model: the whole model with lazy parameters; changed in place.
        weights: relative share of shared experts by rank, for example [2, 1].
        collectives: the world's collectives.
        expert_weights: relative number of routed experts by rank; empty: `weights`.

    Returns:
        The number of experts by rank, and where the layers' outputs are summed, for example "64+64;
        sums: 48 in the block". Ranks whose texts differ (for example because the source of mlx-lm
        is missing on one) do not form a world.

    Raises:
        ConfigError: when the model has no routed experts that can be divided.
    """
    texts, places = [], []
    for experts, ancestors in find_expert_layers(model):
        texts.append(keep_share(experts, expert_weights or weights, collectives.rank))
        places.append(_place_sum(experts, ancestors, weights, collectives))
    runs = [f"{len(list(same))} {place}" for place, same in itertools.groupby(places)]
    return f"{', '.join(dict.fromkeys(texts))}; sums: {', '.join(runs)}"


def find_expert_layers(model: nn.Module) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Return (expert layer, its ancestors within the decoder layer, innermost first).

    Raises:
        ConfigError: when the model has no layer of experts.
    """
    found = []
    by_path = dict(model.named_modules())
    for path in sorted(by_path):
        module = by_path[path]
        if not is_expert_layer(module):
            continue
        parts = path.split(".")
        ancestors = []
        while len(parts) > 1 and not parts[-2].isdigit():
            parts.pop()
            ancestors.append(by_path[".".join(parts)])
        found.append((module, ancestors))
    if not found:
        raise ConfigError(
            "This model has no routed experts that could be divided between ranks: "
            'set world.sharding to "tensor", or world.size to 1.'
        )
    return found


def keep_share(experts: nn.Module, weights: Sequence[int], rank: int) -> str:
    """Keep a rank's experts of a layer, which returns zeros for the others then.

    Args:
        experts: the layer; changed in place.
        weights: relative number of experts by rank.
        rank: the rank.

    Returns:
        The number of experts by rank, for example "64+64".

    Raises:
        ConfigError: when the layer has fewer experts than there are ranks.
    """
    count = next(child.num_experts for child in experts.children().values() if is_switch(child))
    if count < len(weights):
        raise ConfigError(
            f"This model has a layer of {count} routed experts, which cannot be divided "
            f"between {len(weights)} ranks: set world.size to {count} or less."
        )
    shares = divide(count, weights)
    keep_local(experts, *item_range(shares, rank))
    return "+".join(map(str, shares))


def _place_sum(
    experts: nn.Module, ancestors: list[nn.Module], weights: list[int], collectives: Collectives
) -> str:
    """Place the sum over ranks where it is cheapest and certainly correct; return the place."""
    inner: nn.Module = experts
    for block in ancestors[:2]:
        can_sum = hasattr(block, "sharding_group") and _only_sums(type(block))
        can_sum = can_sum and _is_supported(block, inner, experts)
        if can_sum and _divide_shared(block, inner, weights, collectives):
            block.sharding_group = collectives.group
            return "in the block"
        inner = block
    parent = ancestors[0] if ancestors else None
    if (
        parent is not None
        and not hasattr(parent, "sharding_group")
        and _is_supported(parent, experts, experts)
        and _is_linear_after(parent, experts)
        and _divide_shared(parent, experts, weights, collectives)
    ):
        _sum_output(parent, collectives)
        return "behind the block"
    _sum_output(experts, collectives)
    return "behind the experts"


def _is_linear_after(block: nn.Module, experts: nn.Module) -> bool:
    """Tell whether everything that a block does with its experts' output is linear.

    It is not with a norm, or with a matrix with a bias, which N ranks would add N times. A bias
    with fewer numbers than the experts' output belongs to a router and does no harm.
    """
    for child in block.children().values():
        if child is experts or is_mlp(child):
            continue
        if isinstance(child, nn.RMSNorm | nn.LayerNorm):
            return False
        if is_linear(child) and "bias" in child and len(child.bias) >= _width(experts):
            return False
    return True


def _is_supported(block: nn.Module, inner: nn.Module, experts: nn.Module) -> bool:
    """Tell whether no other part of a block can add to the experts' output.

    A part with a matrix as wide as that output might be an unusual shared expert, whose output N
    ranks would add N times.
    """
    for child in block.children().values():
        if child is inner or is_mlp(child) or is_linear(child) or not isinstance(child, nn.Module):
            continue
        matrices = [one for one in child.modules() if is_linear(one)]
        if any(len(one.weight) >= _width(experts) for one in matrices):
            return False
    # All blocks of mlx-lm are tested, but not those in a model's own code.
    return type(block).__module__.startswith("mlx_lm.models.")


def _width(experts: nn.Module) -> int:
    """Return the width of the experts' output."""
    return min(int(child.output_dims) for child in experts.children().values() if is_switch(child))


def _only_sums(block: type) -> bool:
    """Tell whether a block's source passes its group only to sums.

    One family also divides projections over the group, which would add two collectives.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(block)))
    except (OSError, TypeError, SyntaxError):
        return False
    groups = {"sharding_group"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _plain_name(node.value) in groups:
            groups |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            is_sum = _plain_name(node.func) in SUM_FUNCTIONS
            if not is_sum and any(_plain_name(one) in groups for one in given):
                return False
    return True


def _plain_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _divide_shared(
    block: nn.Module, inner: nn.Module, weights: list[int], collectives: Collectives
) -> bool:
    """Keep this rank's part of a block's shared experts; return False if they cannot be divided."""
    shared = [child for child in block.children().values() if child is not inner and is_mlp(child)]
    if not all(can_divide(one, len(weights)) for one in shared):
        return False
    for one in shared:
        divide_mlp(one, weights, collectives.rank)
    return True


def _sum_output(module: nn.Module, collectives: Collectives) -> None:
    """Sum a module's output over ranks at every call.

    Its new type has `unsummed`, the type before, and `sum_output`.
    """
    original = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        return collectives.sum_over_ranks(original.__call__(self, *args, **kwargs))

    names = {
        "__call__": call,
        "unsummed": original,
        "sum_output": staticmethod(collectives.sum_over_ranks),
    }
    module.__class__ = type(original.__name__, (original,), names)
