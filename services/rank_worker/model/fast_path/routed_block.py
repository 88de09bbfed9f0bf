"""A block of routed experts whose forwards of few tokens are kernels: router, experts and sum."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

from services.rank_worker.model.fast_path.gated_mlp import GatedMlp, has_gated_matrices
from services.rank_worker.model.fast_path.kernels.dialects import device_numbers
from services.rank_worker.model.fast_path.kernels.few_experts import TOKENS_MAX
from services.rank_worker.model.fast_path.kernels.kernels import Kernels
from services.rank_worker.model.fast_path.kernels.matrices import PlainMatrix
from services.rank_worker.model.fast_path.kernels.peer_sums import PeerSums
from services.rank_worker.model.fast_path.kernels.routing import (
    ExpertResults,
    RoutingKernels,
    RoutingRule,
)
from services.rank_worker.model.fast_path.kernels.tensor_cores import can_multiply
from services.rank_worker.model.fast_path.merged_linear import single_product
from services.rank_worker.model.sharding.local_experts import LocalExperts, is_expert_layer
from services.rank_worker.model.sharding.mlp_split import is_linear, is_mlp
from services.rank_worker.peers.collectives import sum_in_group

_BIASES, _FACTOR = ("e_score_correction_bias", "expert_bias"), "routed_scaling_factor"
_GROUPS = ("n_group", "num_expert_group")
"""Names that the families of mlx-lm have in common, of a router, its block, or their settings."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockForm:
    """The modules of a block: it adds up each token's experts, and shared ones, if any."""

    experts: Any
    local: LocalExperts
    """Computes `experts`."""
    router: Any
    """A module with the matrix [experts, dim]."""
    bias: mx.array | None
    """Added to the scores for the choice, [experts]."""
    factor: float
    """Of the experts' weights."""
    shared: Any
    """An MLP that computes every token, if the block has one."""
    shared_gate: Any
    """A matrix with one output: `shared` counts its sigmoid times; None: once."""
    sum_over_ranks: Callable[[mx.array], mx.array] | None
    """Completes the block's results; None: this rank has all of them."""

    @property
    def matrix(self) -> mx.array | None:
        """The router's, [experts, dim]; None: it is quantized."""
        return None if isinstance(self.router, nn.QuantizedLinear) else self.router.weight

    def logits(self, x: mx.array) -> mx.array:
        """Return the router's, [tokens, experts], for tokens [tokens, dim]."""
        found: mx.array = self.router(x) if self.matrix is None else x @ self.matrix.T
        return found


def has_expert_layer(module: nn.Module) -> bool:
    """Tell whether a module has a layer of experts as its own child."""
    children = (one for one in module.children().values() if isinstance(one, nn.Module))
    return any(map(is_expert_layer, children))


def read_block(block: nn.Module) -> BlockForm | None:
    """Recognize a block by its modules and shapes; None: it is of another form.

    How it makes weights of logits cannot be seen; the proof finds it.
    """
    children: dict[str, Any] = block.children()
    if not all(isinstance(one, nn.Module) for one in children.values()):
        return None
    experts = [one for one in children.values() if is_expert_layer(one)]
    if len(experts) != 1:
        return None
    local = getattr(type(experts[0]), "local_experts", None)
    # Where the experts' results are summed over ranks, they are not only added up in the block.
    if local is None or hasattr(type(experts[0]), "sum_output"):
        return None
    rest = [one for one in children.values() if one is not experts[0]]
    routers = [one for one in rest if _is_router(one, local.total)]
    shared = [one for one in rest if is_mlp(one)]
    gates = [one for one in rest if is_linear(one) and len(one.weight) == 1]
    if len(routers) + len(shared) + len(gates) != len(rest):
        return None
    if len(routers) != 1 or len(shared) > 1 or len(gates) > len(shared):
        return None
    owners: list[Any] = [routers[0], block]
    if any((_setting(owners, name) or 1) > 1 for name in _GROUPS):
        # Only experts of the best groups are chosen from, which few tokens may not show.
        return None
    return BlockForm(
        experts[0],
        local,
        routers[0],
        next((one[name] for one in owners for name in _BIASES if name in one), None),
        float(_setting(owners, _FACTOR) or 1.0),
        shared[0] if shared else None,
        gates[0] if gates else None,
        _sum_function(block),
    )


def _setting(owners: list[Any], name: str) -> Any:
    """Return what modules or their settings have under a name; None: they have nothing."""
    settings = (getattr(one, kept, None) for one in owners for kept in ("args", "config"))
    return next((getattr(one, name) for one in (*owners, *settings) if hasattr(one, name)), None)


def _sum_function(block: Any) -> Callable[[mx.array], mx.array] | None:
    group = getattr(block, "sharding_group", None)
    if group is not None:
        return functools.partial(sum_in_group, group=group)
    found: Callable[[mx.array], mx.array] | None = getattr(type(block), "sum_output", None)
    return found


def _is_router(module: Any, experts: int) -> bool:
    if isinstance(module, nn.QuantizedLinear):
        return "bias" not in module and len(module.weight) == experts
    return (
        not module.children()
        and {"weight"} <= set(module.parameters()) <= {"weight", *_BIASES}
        and module.weight.ndim == 2
        and len(module.weight) == experts
    )


class RoutedBlock:
    """Computes a block for few tokens."""

    def __init__(self, form: BlockForm, routing: RoutingKernels, kernels: Kernels) -> None:
        """Take the block's weights; waits for the device.

        Args:
            form: of the block.
            routing: routes tokens, and adds up what the experts compute.
            kernels: compute the shared experts, and multiply with the router's matrix.
        """
        self._form, self._routing = form, routing
        self.rule = RoutingRule(form.local.experts_per_token, is_sigmoid=False, normalizes=True)
        """How the router chooses; the proof finds the right one."""
        matrix = form.matrix
        has_plain_matrix = matrix is not None and can_multiply(matrix)
        self._few_rows = kernels.few_rows if has_plain_matrix else None
        self._shared = form.shared
        if form.shared is not None and has_gated_matrices(form.shared):
            self._shared = GatedMlp(form.shared, kernels)
        gate = form.shared_gate
        self._shared_gate = None if gate is None else single_product(gate, kernels.few_rows)
        # A view, once: otherwise each step would have a node for it.
        self._transposed = None if matrix is None else matrix.T
        self._factor = device_numbers(form.factor)
        mx.eval(self._transposed)

    def takes(self, x: mx.array) -> bool:
        """Tell whether the kernels compute the block for tokens [..., dim]."""
        few = self._form.local.few
        if few is not None:
            return few.takes(self._form.experts, x, self.rule.top)
        return x.size // x.shape[-1] <= TOKENS_MAX

    def __call__(self, x: mx.array) -> mx.array:
        """Build the block for tokens that it takes: [tokens, dim] -> [tokens, dim]."""
        added = self.compute_own(x)
        sum_over_ranks = self._form.sum_over_ranks
        return added if sum_over_ranks is None else sum_over_ranks(added)

    def compute_own(self, x: mx.array, *, with_shared: bool = True) -> mx.array:
        """Build this rank's part of the block: [tokens, dim] -> [tokens, dim].

        Args:
            x: tokens that it takes.
            with_shared: add the result of shared experts, if there are any.
        """
        results = self._compute(x)
        if not with_shared:
            results = dataclasses.replace(results, shared=None, gate=None)
        return self._routing.add_experts(results)

    @property
    def is_whole(self) -> bool:
        """Whether this rank computes the block without others."""
        return self._form.sum_over_ranks is None

    def add_norm(
        self,
        hidden: mx.array,
        x: mx.array,
        weight: mx.array,
        epsilon: mx.array,
        sums: PeerSums | None,
    ) -> tuple[mx.array, mx.array]:
        """Build a block, and add and normalize its result in the same operation.

        Args:
            hidden: what the result is added to, [tokens, dim].
            x: tokens that it takes, [tokens, dim].
            weight: of the norm; see `RoutingKernels.add_experts_norm`.
            epsilon: of the norm.
            sums: sums over ranks; needed, and used, only if the block is not whole.

        Returns:
            (sum, normalized sum), [tokens, dim].
        """
        results = self._compute(x)
        if self.is_whole:
            return self._routing.add_experts_norm(hidden, results, weight, epsilon)
        assert sums is not None
        return sums.add_experts_norm(hidden, results, weight, epsilon)

    def _compute(self, x: mx.array) -> ExpertResults:
        form = self._form
        logits = self._multiply_router(x)
        local = None if form.local.few is None else form.local.experts
        routed = self._routing.route(logits, form.bias, self._factor, self.rule, local)
        product = form.experts(x, routed.experts, routed.groups)
        shared = None if self._shared is None else self._shared(x)
        gate = None if self._shared_gate is None else self._shared_gate(x)
        return ExpertResults(product, routed.weights, shared, gate)

    def _multiply_router(self, x: mx.array) -> mx.array:
        matrix = self._form.matrix
        if self._few_rows is not None and matrix is not None and x.dtype == matrix.dtype:
            # Of 16 bits, many logits would be equal.
            return self._few_rows.multiply(x, PlainMatrix(matrix), None, dtype=mx.float32)
        return self._form.logits(x) if self._transposed is None else x @ self._transposed


def use_kernels(block: nn.Module, routed: RoutedBlock) -> None:
    """Have kernels compute a block's forwards of few tokens.

    Args:
        block: its class is replaced. It also takes tokens [tokens, dim] then.
        routed: computes these.
    """
    original: Any = type(block)

    def call(module: Any, x: mx.array) -> mx.array:
        if not routed.takes(x):
            result: mx.array = original.__call__(module, x[None] if x.ndim == 2 else x)
            return result.reshape(x.shape)
        return routed(x) if x.ndim == 2 else routed(x.reshape(-1, x.shape[-1])).reshape(x.shape)

    names = {"__call__": call, "routed": routed}
    block.__class__ = type(original.__name__, (original,), names)


def find_routed(module: Any) -> RoutedBlock | None:
    """Return what computes a block's forwards of few tokens; None: mlx-lm's code does."""
    found: RoutedBlock | None = getattr(type(module), "routed", None)
    return found


def call_without_sum(block: Any, x: mx.array) -> mx.array:
    """Call a block that has no kernels, without its sum over ranks: [..., dim] -> [..., dim]."""
    kind = getattr(type(block), "unsummed", type(block))
    group = getattr(block, "sharding_group", None)
    if group is None:
        return kind.__call__(block, x)  # type: ignore[no-any-return]
    block.sharding_group = None
    try:
        return kind.__call__(block, x)  # type: ignore[no-any-return]
    finally:
        block.sharding_group = group
