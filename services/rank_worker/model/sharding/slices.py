"""Cutting a two-layer perceptron along its inner width: slices of lazy parameters, no sums."""

from typing import Any

from mlx import nn

from services.rank_worker.model.sharding.shares import divide, span


def is_linear(module: Any) -> bool:
    """Tell whether a module is one matrix, quantized or not."""
    return isinstance(module, nn.Linear | nn.QuantizedLinear)


def is_mlp(module: Any) -> bool:
    """Tell whether a module is a perceptron: widens, with or without a gate, and narrows again."""
    if not isinstance(module, nn.Module):
        return False
    children = module.children()
    narrow = [children.get(name) for name in ("down_proj", "up_proj")]
    return all(map(is_linear, narrow)) and is_linear(children.get("gate_proj", narrow[0]))


def can_cut(mlp: nn.Module, ranks: int) -> bool:
    """Tell whether every rank would get something of its inner width."""
    return _width(mlp) // _unit(mlp) >= ranks and _width(mlp) % _unit(mlp) == 0


def cut_mlp(mlp: nn.Module, weights: list[int], rank: int) -> None:
    """Keep a rank's part of the inner width; what the parts give adds up to what the whole gave.

    Args:
        mlp: `is_mlp`, and `can_cut` between so many ranks.
        weights: how much each rank takes compared with the others.
        rank: whose part is kept.
    """
    unit = _unit(mlp)
    start, stop = (unit * one for one in span(divide(_width(mlp) // unit, weights), rank))
    for name in ("gate_proj", "up_proj"):
        if name in mlp:
            _cut_rows(mlp[name], start, stop)
    _cut_columns(mlp.down_proj, start, stop)
    if rank != 0 and "bias" in mlp.down_proj:
        # Added once: by the first rank.
        del mlp.down_proj["bias"]


def _width(mlp: nn.Module) -> int:
    return int(mlp.up_proj.weight.shape[0])


def _unit(mlp: nn.Module) -> int:
    """Return what the width is cut into multiples of: numbers that share a scale stay together."""
    down = mlp.down_proj
    return int(down.group_size) if isinstance(down, nn.QuantizedLinear) else 1


def _cut_rows(linear: nn.Module, start: int, stop: int) -> None:
    for name in ("weight", "scales", "biases", "bias"):
        if linear.get(name) is not None:
            linear[name] = linear[name][start:stop]


def _cut_columns(linear: nn.Module, start: int, stop: int) -> None:
    whole = _columns(linear)
    for name in ("weight", "scales", "biases"):
        if linear.get(name) is not None:
            # Packed numbers and scales have fewer columns than the matrix.
            columns = linear[name].shape[-1]
            linear[name] = linear[name][:, start * columns // whole : stop * columns // whole]


def _columns(linear: nn.Module) -> int:
    columns = int(linear.weight.shape[-1])
    return columns * 32 // int(linear.bits) if isinstance(linear, nn.QuantizedLinear) else columns
