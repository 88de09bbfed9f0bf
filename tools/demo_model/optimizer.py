"""Optimizer: Muon for the matrices of the layers, AdamW for embeddings and norms.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest orthogonal matrix. Small
networks learn to copy several times faster with it than with AdamW alone.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonalize(stack: Tensor, steps: int = 5) -> Tensor:
    """Replace each matrix by one that is nearly orthogonal and near it, by Newton-Schulz steps.

    Args:
        stack: the matrices, float of shape (count, rows, columns).
        steps: number of steps.

    Returns:
        Shape and dtype of `stack`.
    """
    x = stack.bfloat16() if stack.is_cuda else stack
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).to(stack.dtype)


class Muon:
    """Muon: an optimizer for matrices that makes each update orthogonal.

    Args:
        matrices: parameters of shape (rows, columns); those of equal shape are updated together.
        rate: full learning rate.
        momentum: share of the earlier gradients in the mean of gradients.
    """

    def __init__(self, matrices: list[nn.Parameter], rate: float, momentum: float = 0.95) -> None:
        self.rate = rate
        self.momentum = momentum
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self.groups = [(group, torch.zeros_like(torch.stack(group))) for group in groups.values()]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Update the matrices from their gradients, at `factor` times the full learning rate."""
        for group, momentum in self.groups:
            gradient = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            momentum.lerp_(gradient, 1 - self.momentum)
            update = orthogonalize(gradient.lerp(momentum, self.momentum))
            rows, columns = group[0].shape
            rate = self.rate * factor
            scale = -rate * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(group, 1 - 0.1 * rate)
            torch._foreach_add_(group, list(update.unbind()), alpha=scale)


class Optimizer:
    """Optimizer of a network: Muon for its matrices, AdamW for embeddings and norms.

    Args:
        network: the network whose parameters are updated.
        matrix_rate: full learning rate of the matrices.
        other_rate: full learning rate of the other parameters.
    """

    def __init__(self, network: nn.Module, matrix_rate: float, other_rate: float) -> None:
        named = list(network.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in named if p.dim() != 2 or "embed" in name]
        self.muon = Muon(matrices, matrix_rate)
        self.other_rate = other_rate
        self.adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, factor: float) -> None:
        """Update the network from its gradients, and clear these.

        Args:
            factor: share of the full learning rates, 0 to 1.
        """
        self.muon.step(factor)
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for matrices, _ in self.muon.groups:
            for matrix in matrices:
                matrix.grad = None


def learning_rate_factor(progress: float, warmup: float = 0.01) -> float:
    """Return the share of the full learning rate: it rises, stays at 1, and falls to 0.

    Args:
        progress: finished share of the run, 0 to 1; the last 60 % are the fall.
        warmup: share of the run in which the rate rises.
    """
    if progress < warmup:
        return progress / warmup
    return min(1.0, max(0.0, (1.0 - progress) / 0.6))
