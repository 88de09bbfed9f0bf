"""Divides routed experts between ranks; everything else stays whole on each of them.

Found by structure, because some forty families of mlx-lm have such layers under as many names: a
layer of experts is a module with several matrices per expert. Its outputs are zeros for experts of
other ranks (`local_experts`), and one sum over ranks puts them together. Where that sum can be:

- in the block itself, where mlx-lm's own has a `sharding_group` and nothing but a sum over it;
- behind the block, where what follows the experts in it is linear;
- right behind the experts, k times as many numbers, wherever that cannot be told: always right.

In the first two cases shared experts are cut like any sharded tensor, because the sum is paid for
anyway; in the third they stay whole. Dense layers stay whole too: cutting them would cost a sum
each.
"""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx import nn

from services.rank_worker.collectives import Collectives
from services.rank_worker.model.sharding.local_experts import is_switch, keep_local
from services.rank_worker.model.sharding.shares import divide, span
from services.rank_worker.model.sharding.slices import can_cut, cut_mlp, is_linear, is_mlp
from shared.errors import ConfigError

SUMS = {"all_sum", "sum_gradients"}
"""What a block may do with its group, besides keeping it."""


def split_experts(model: nn.Module, weights: list[int], collectives: Collectives) -> str:
    """Keep this rank's experts of each layer.

    Args:
        model: whole, its parameters lazy.
        weights: how much each rank takes compared with the others.
        collectives: the world.

    Returns:
        How many experts each rank has, and where the sums are, in words; equal on all ranks, or
        they do not form a world: each reads its own mlx-lm's source, which may be missing.

    Raises:
        ConfigError: the model has no routed experts that can be divided.
    """
    found = list(_layers(model))
    if not found:
        raise ConfigError(
            "This model has no routed experts that could be divided between ranks: "
            'set world.sharding to "tensor", or world.size to 1.'
        )
    texts, places = [], []
    for experts, holders in found:
        count = next(child.num_experts for child in experts.children().values() if is_switch(child))
        if count < len(weights):
            raise ConfigError(
                f"This model has a layer of {count} routed experts, which cannot be divided "
                f"between {len(weights)} ranks: set world.size to {count} or less."
            )
        shares = divide(count, weights)
        keep_local(experts, *span(shares, collectives.rank))
        places.append(_sum_up(experts, holders, weights, collectives))
        texts.append("+".join(map(str, shares)))
    runs = [f"{len(list(same))} {place}" for place, same in itertools.groupby(places)]
    return f"{', '.join(dict.fromkeys(texts))}; sums: {', '.join(runs)}"


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield layers of experts, each with the modules that hold it within its decoder layer."""
    by_path = dict(model.named_modules())
    for path in sorted(by_path):
        module = by_path[path]
        if sum(map(is_switch, module.children().values())) < 2:
            continue
        parts = path.split(".")
        holders = []
        while len(parts) > 1 and not parts[-2].isdigit():
            parts.pop()
            holders.append(by_path[".".join(parts)])
        yield module, holders


def _sum_up(
    experts: nn.Module, holders: list[nn.Module], weights: list[int], collectives: Collectives
) -> str:
    """Put the sum over ranks where it costs least and is surely right; say where that is."""
    inner: nn.Module = experts
    for depth, holder in enumerate(holders):
        own = hasattr(holder, "sharding_group") and _only_sums(type(holder))
        own = own and _is_understood(holder, inner, experts)
        if own and _cut_shared(holder, inner, weights, collectives):
            holder.sharding_group = collectives.group
            return "in the block"
        inner = holder
        if depth == 1:
            break
    block = holders[0] if holders else None
    if (
        block is not None
        and not hasattr(block, "sharding_group")
        and _is_understood(block, experts, experts)
        and _is_linear_behind(block, experts)
        and _cut_shared(block, experts, weights, collectives)
    ):
        _sum_behind(block, collectives)
        return "behind the block"
    _sum_behind(experts, collectives)
    return "behind the experts"


def _is_mlx_lms(block: nn.Module) -> bool:
    """Tell whether a block is mlx-lm's, each of which is tested, and not a model's own code."""
    return type(block).__module__.startswith("mlx_lm.models.")


def _is_linear_behind(block: nn.Module, experts: nn.Module) -> bool:
    """Tell whether all a block does with what its experts give is linear.

    A norm may lie behind them, and so may a matrix with a bias, which N ranks would add N times. A
    bias in front of few outputs is a router's.
    """
    for child in block.children().values():
        if child is experts or is_mlp(child):
            continue
        if isinstance(child, nn.RMSNorm | nn.LayerNorm):
            return False
        if is_linear(child) and "bias" in child and len(child.bias) >= _width(experts):
            return False
    return True


def _is_understood(block: nn.Module, inner: nn.Module, experts: nn.Module) -> bool:
    """Tell whether every part of a block is one that adds nothing to what the experts give.

    A part with a matrix as wide as what they give might: a shared expert of another shape, whose
    output N ranks would add N times.
    """
    for child in block.children().values():
        if child is inner or is_mlp(child) or is_linear(child) or not isinstance(child, nn.Module):
            continue
        matrices = [one for one in child.modules() if is_linear(one)]
        if any(len(one.weight) >= _width(experts) for one in matrices):
            return False
    return _is_mlx_lms(block)


def _width(experts: nn.Module) -> int:
    """Return how wide what experts give is."""
    return min(int(child.output_dims) for child in experts.children().values() if is_switch(child))


def _only_sums(block: type) -> bool:
    """Tell whether a block's source gives its group to nothing but a sum.

    One family also divides projections over it, which would cost two more collectives.
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
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if any(_plain_name(one) in groups for one in given) and name not in SUMS:
                return False
    return True


def _plain_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _cut_shared(
    block: nn.Module, inner: nn.Module, weights: list[int], collectives: Collectives
) -> bool:
    """Keep this rank's part of a block's shared experts; False: they cannot be cut."""
    shared = [child for child in block.children().values() if child is not inner and is_mlp(child)]
    if not all(can_cut(one, len(weights)) for one in shared):
        return False
    for one in shared:
        cut_mlp(one, weights, collectives.rank)
    return True


def _sum_behind(module: nn.Module, collectives: Collectives) -> None:
    """Add up over ranks what a module gives."""
    original = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        return collectives.sum_over_ranks(original.__call__(self, *args, **kwargs))

    module.__class__ = type(original.__name__, (original,), {"__call__": call})
