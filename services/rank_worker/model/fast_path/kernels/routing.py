"""Routing of few tokens to experts, and the sum of the experts' results."""

import dataclasses
from typing import Any

import mlx.core as mx

from services.rank_worker.model.fast_path.kernels.dialects import (
    Gpu,
    make_kernel,
    start_norm,
    vector_size,
)
from services.rank_worker.model.fast_path.kernels.few_experts import sorting_constants
from services.rank_worker.model.fast_path.kernels.tensor_cores import HEADER

TOP_MAX = 32
"""Most experts per token: one per thread of a warp."""
EXPERTS_MAX = 1_024
"""Most experts of a layer: their preferences stand in registers."""
_EXPERTS_OF_ALL_THREADS = 512
"""Most experts with which 1,024 threads have registers enough."""
_ROUTE_THREADS = 128
"""Threads of a group that routes tokens without sorting; each warp takes one token."""
_ADD_THREADS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a router's logits become a choice of experts and their weights."""

    top: int
    """Experts per token."""
    is_sigmoid: bool
    """Scores are sigmoids of the logits; otherwise softmax of all of them."""
    normalizes: bool
    """Weights are scores divided by the sum of the chosen ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Which experts compute which tokens."""

    experts: mx.array
    """int32 [tokens, top], of the whole model, the best first."""
    weights: mx.array
    """float32 [tokens, top], by which their results are multiplied."""
    groups: mx.array | None
    """The assignments sorted by expert, see `FewExperts.sort`; None: they are not."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertResults:
    """What the experts of some tokens have computed, to be added up."""

    product: mx.array
    """[tokens, top, dim]."""
    weights: mx.array
    """float32 [tokens, top], by which these are multiplied."""
    shared: mx.array | None
    """[tokens, dim] of shared experts in the dtype of `product`, added; None: without them."""
    gate: mx.array | None
    """[tokens, 1] in this dtype: `shared` counts sigmoid(gate) times; None: once."""


class RoutingKernels:
    """Starts the kernels. Compiled kernels are kept by MLX."""

    def __init__(self, device: Gpu) -> None:
        """Prepare for a kind of device; nothing is compiled yet."""
        names, routed = ["logits", "bias", "factor"], ["chosen", "weights"]
        self._route = make_kernel(device, "experts/route", names, routed)
        if device == "cuda":
            outputs = [*routed, "groups"]
            self._route_sorted = make_kernel(
                device, "experts/route_sorted", names, outputs, header=HEADER
            )
        results = ["product", "weights", "shared", "gate"]
        self._add_experts = make_kernel(device, "experts/add_experts", results, ["added"])
        names = [*results, "input", "weight", "constants"]
        outputs = ["added", "normalized"]
        self._add_experts_norm = make_kernel(device, "experts/add_experts_norm", names, outputs)

    def route(
        self,
        logits: mx.array,
        bias: mx.array | None,
        factor: mx.array,
        rule: RoutingRule,
        sorted_for: range | None = None,
    ) -> RoutedTokens:
        """Choose the experts of each token; of equal ones the first.

        Args:
            logits: [tokens, experts].
            bias: [experts], added to the scores for the choice, not for the weights; or None.
            factor: `device_numbers`, of the weights.
            rule: how.
            sorted_for: experts whose weights this rank has, by which assignments are sorted (CUDA
                only); None: they are not sorted.
        """
        tokens, experts = logits.shape
        inputs = [logits, factor if bias is None else bias, factor]
        template = [
            *(("EXPERTS", experts), ("TOP", rule.top), ("SIGMOID", rule.is_sigmoid)),
            *(("NORMALIZES", rule.normalizes), ("HAS_BIAS", bias is not None)),
        ]
        shapes, dtypes = [(tokens, rule.top)] * 2, [mx.int32, mx.float32]
        if sorted_for is None:
            groups = -(-tokens // (_ROUTE_THREADS // 32))
            chosen, weights = self._route(
                inputs=inputs,
                template=[*template, ("THREADS", _ROUTE_THREADS)],
                grid=(groups * _ROUTE_THREADS, 1, 1),
                threadgroup=(_ROUTE_THREADS, 1, 1),
                output_shapes=shapes,
                output_dtypes=dtypes,
            )
            return RoutedTokens(chosen, weights, None)
        # A thread holds two numbers of each 32nd expert, and a group has 65,536 registers.
        threads = 1_024 if experts <= _EXPERTS_OF_ALL_THREADS else 512
        chosen, weights, sorted_assignments = self._route_sorted(
            inputs=inputs,
            template=[*template, *sorting_constants(sorted_for, threads)],
            grid=(threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[*shapes, (2 * tokens * rule.top + 1,)],
            output_dtypes=[*dtypes, mx.int32],
        )
        return RoutedTokens(chosen, weights, sorted_assignments)

    def add_experts(self, results: ExpertResults) -> mx.array:
        """Add up the results of each token's experts, times their weights: [tokens, dim]."""
        tokens, _, dim = results.product.shape
        template = sum_template(results)
        groups = -(-dim // (dict(template)["VECTOR_SIZE"] * _ADD_THREADS))
        added: mx.array
        (added,) = self._add_experts(
            inputs=sum_inputs(results),
            template=[*template, ("THREADS", _ADD_THREADS)],
            grid=(groups * _ADD_THREADS, tokens, 1),
            threadgroup=(_ADD_THREADS, 1, 1),
            output_shapes=[(tokens, dim)],
            output_dtypes=[results.product.dtype],
        )
        return added

    def add_experts_norm(
        self, hidden: mx.array, results: ExpertResults, weight: mx.array, epsilon: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Add up the results of each token's experts, and normalize the sum with the layer's input.

        Args:
            hidden: the layer's input, [tokens, dim] in the dtype of the results.
            results: of the experts.
            weight: [dim], of the norm.
            epsilon: `device_numbers`, of the norm.

        Returns:
            (sum with `hidden`, normalized sum), as `Kernels.add_norm` of `add_experts`.
        """
        inputs = [*sum_inputs(results), hidden, weight, epsilon]
        return start_norm(self._add_experts_norm, inputs, sum_template(results), hidden)


def sum_inputs(results: ExpertResults) -> list[mx.array]:
    """Return the arrays of experts' results, the first inputs of a kernel that sums them."""
    product = results.product
    others = (product if one is None else one for one in (results.shared, results.gate))
    return [product, results.weights, *others]


def sum_template(results: ExpertResults) -> list[tuple[str, Any]]:
    """Return the constants of experts' results, the first of that kernel's template."""
    product = results.product
    _, top, dim = product.shape
    return [
        *(("T", product.dtype), ("DIM", dim), ("TOP", top)),
        ("VECTOR_SIZE", vector_size(dim, product.dtype)),
        *(("HAS_SHARED", results.shared is not None), ("HAS_GATE", results.gate is not None)),
    ]
