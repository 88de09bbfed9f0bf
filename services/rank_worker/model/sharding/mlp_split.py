"""Divides an MLP along its hidden width by slicing lazy parameters. Adds no collectives."""

from typing import Any

from mlx import nn

from shared.model.sharding.shares import divide, item_range


def is_linear(module: Any) -> bool:
    """Tell whether a module is one matrix, quantized or not."""
    return isinstance(module, nn.Linear | nn.QuantizedLinear)


def is_mlp(module: Any) -> bool:
    """Tell whether a module is an MLP with `up_proj`, `down_proj` and an optional `gate_proj`."""
    if not isinstance(module, nn.Module):
        return False
    children = module.children()
    required = [children.get(name) for name in ("down_proj", "up_proj")]
    return all(map(is_linear, required)) and is_linear(children.get("gate_proj", required[0]))


def can_divide(mlp: nn.Module, ranks: int) -> bool:
    """Tell whether an MLP's hidden width can be divided so that every rank gets a part.

    Args:
        mlp: a module for which `is_mlp` holds.
        ranks: number of ranks.
    """
    return _width(mlp) // _unit(mlp) >= ranks and _width(mlp) % _unit(mlp) == 0


def divide_mlp(mlp: nn.Module, weights: list[int], rank: int) -> None:
    """Keep one rank's part of the hidden width. The outputs of all ranks sum to the MLP's output.

    Args:
        mlp: a module for which `is_mlp` and `can_divide` hold; changed in place.
        weights: relative share of the width by rank, for example [2, 1].
        rank: the rank whose part is kept.
    """
    unit = _unit(mlp)
    start, stop = (unit * one for one in item_range(divide(_width(mlp) // unit, weights), rank))
    for name in ("gate_proj", "up_proj"):
        if name in mlp:
            _slice_rows(mlp[name], start, stop)
    _slice_columns(mlp.down_proj, start, stop)
    if rank != 0 and "bias" in mlp.down_proj:
        # Only rank 0 keeps the bias, so that the sum contains it once.
        del mlp.down_proj["bias"]


def _width(mlp: nn.Module) -> int:
    return int(mlp.up_proj.weight.shape[0])


def _unit(mlp: nn.Module) -> int:
    """Return the smallest part of the width: weights that share a quantization scale."""
    down = mlp.down_proj
    return int(down.group_size) if isinstance(down, nn.QuantizedLinear) else 1


def _slice_rows(linear: nn.Module, start: int, stop: int) -> None:
    for name in ("weight", "scales", "biases", "bias"):
        if linear.get(name) is not None:
            linear[name] = linear[name][start:stop]


def _slice_columns(linear: nn.Module, start: int, stop: int) -> None:
    total = int(linear.weight.shape[-1])
    if isinstance(linear, nn.QuantizedLinear):
        total = total * 32 // int(linear.bits)
    for name in ("weight", "scales", "biases"):
        if linear.get(name) is not None:
            # Packed weights and scales have fewer columns than the matrix.
            columns = linear[name].shape[-1]
            linear[name] = linear[name][:, start * columns // total : stop * columns // total]
