"""Runs the routed experts that this rank holds, and returns zeros for the others.

Every rank has every token, and all routers pick the same experts. A pair of a token and an expert
that it is routed to is called an assignment. The result of a foreign assignment (whose expert is on
another rank) must be zero, so that the sum over ranks equals the result of one rank.

On CUDA kernels compute forwards of few tokens where they can (`LocalExperts.few`); they pass over
foreign assignments. Otherwise the shapes of a lazy graph cannot depend on values that are not
computed yet. So there are two ways:

- Short forwards (decode) compute a foreign assignment with an expert that this rank reads anyway,
  and drop the result. Their time is spent on reading experts, so this costs almost nothing.
- Long forwards (prefill) spend their time on arithmetic, and with N ranks all but 1/N of the
  assignments are foreign. Here the host waits for the device to count this rank's assignments, and
  computes only these. This pays only when the foreign arithmetic would take longer than the wait
  (`WAIT_FLOPS`). The result has the same shape either way, so ranks may decide differently.

Only prefill may wait (`allow_device_wait`), because decodes are built ahead of the device. A wait
also covers all work started before, so such a prefill is not built ahead (`device_wait_tokens`).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from services.rank_worker.device.hardware import device_kind

LONG_TOKENS = 256
"""Forwards with fewer tokens never wait: their time is spent on reading experts."""
LONG_TOKENS_CPU = 32

WAIT_FLOPS = {"cpu": 1e7, "metal": 5e9, "cuda": 1e12}
"""FLOPs of all assignments above which one wait costs less than the foreign arithmetic. Measured on
two H200s with a layer of Qwen3-30B-A3B: 1.5e11 take 3.7 ms without the wait and 4.3 ms with it."""

ROWS_MULTIPLE = 64
"""The number of own assignments is rounded up to a multiple, so that array sizes recur."""

_MAY_WAIT: ContextVar[bool] = ContextVar("allow_device_wait", default=False)


@contextmanager
def allow_device_wait() -> Iterator[None]:
    """Let forwards with many tokens that are built in this context wait for the device.

    Such a forward waits until the device has routed its tokens, and then computes only the tokens
    of this rank's experts. See `device_wait_tokens` for how many tokens are many.
    """
    before = _MAY_WAIT.set(True)
    try:
        yield
    finally:
        _MAY_WAIT.reset(before)


def device_wait_tokens(model: nn.Module) -> int | None:
    """Return the fewest tokens with which a forward waits for the device; None: it never waits.

    Forwards wait only within `allow_device_wait`, until the device has routed their tokens to
    experts.

    Args:
        model: must have been called once, so that the number of experts per token is known.
    """
    found = (one.device_wait_tokens for _, one in expert_layers(model) if one.has_foreign)
    return min(found, default=None)


def expert_layers(model: nn.Module) -> list[tuple[nn.Module, "LocalExperts"]]:
    """Return the layers that `keep_local` or `keep_all` has changed, and what computes them."""
    layers = [(one, getattr(type(one), "local_experts", None)) for one in model.modules()]
    return [(module, local) for module, local in layers if local is not None]


def keep_all(model: nn.Module) -> None:
    """Have `LocalExperts` compute all layers of experts of a rank that holds every expert.

    So such a rank, too, can compute forwards of few tokens in another way (`LocalExperts.few`).

    Args:
        model: its layers without a call of `keep_local` are changed in place.
    """
    for module in model.modules():
        if is_expert_layer(module) and not hasattr(type(module), "local_experts"):
            switches = filter(is_switch, module.children().values())
            keep_local(module, 0, int(next(switches).num_experts))


def keep_local(experts: nn.Module, first: int, stop: int) -> None:
    """Keep experts [first, stop) of a layer, and make it return zeros for the others.

    Args:
        experts: a layer such as `SwitchGLU`: takes tokens [..., dim] and integer expert indices
            [..., k] with the same leading shape, and returns [..., k, dim]. The first axis of its
            parameters is the expert; they may be lazy.
        first: the first expert to keep.
        stop: the expert after the last one.
    """
    switches = [child for child in experts.children().values() if is_switch(child)]
    total = int(switches[0].num_experts)
    for switch in switches if stop - first < total else []:
        for name, value in switch.items():
            if isinstance(value, mx.array):
                switch[name] = value[first:stop]
    expert_weights = sum(switch.input_dims * switch.output_dims for switch in switches)
    original = type(experts)
    local = LocalExperts(original, first, stop - first, total, expert_weights)

    def call(
        module: nn.Module, x: mx.array, indices: mx.array, groups: mx.array | None = None
    ) -> mx.array:
        return local(module, x, indices, groups)

    # A subclass, because Python looks `__call__` up on the type: parameters keep their names.
    names = {"__call__": call, "local_experts": local}
    experts.__class__ = type(original.__name__, (original,), names)


def is_switch(module: Any) -> bool:
    """Tell whether a module holds one matrix per expert, quantized or not."""
    return isinstance(module, SwitchLinear | QuantizedSwitchLinear)


def is_expert_layer(module: nn.Module) -> bool:
    """Tell whether a module is a layer of experts: it has several matrices per expert."""
    return sum(map(is_switch, module.children().values())) > 1


class FewTokens(Protocol):
    """Computes layers of experts for few tokens."""

    def takes(self, layer: Any, x: mx.array, experts_per_token: int) -> bool:
        """Tell whether it computes a layer for tokens [..., dim] of this number and dtype."""

    def __call__(
        self,
        layer: Any,
        x: mx.array,
        indices: mx.array,
        local: range,
        groups: mx.array | None = None,
    ) -> mx.array:
        """Compute a layer.

        Args:
            layer: the layer.
            x: [tokens, dim].
            indices: integer [tokens, k], experts of the whole model.
            local: those whose weights the layer has.
            groups: the assignments sorted by expert, if they are already.

        Returns:
            [tokens, k, dim]; zeros for experts that are not local.
        """


class LocalExperts:
    """Computes this rank's experts of a layer, with zeros for other ranks' experts, if any."""

    def __init__(
        self, original: type[nn.Module], first: int, count: int, total: int, expert_weights: int
    ) -> None:
        """Store the range of this rank's experts.

        Args:
            original: the layer's type; runs experts 0 to count - 1.
            first: the model's index of the first local expert.
            count: number of local experts.
            total: number of the layer's experts on all ranks together.
            expert_weights: number of weights of one expert.
        """
        self._original = original
        self._count = count
        self.experts = range(first, first + count)
        """The model's indices of the local experts."""
        self.total = total
        """Number of the layer's experts on all ranks together."""
        self.few: FewTokens | None = None
        """Computes forwards of few tokens; None: mlx-lm's code does."""
        self._expert_weights = expert_weights
        self.experts_per_token = 1
        """Of the last call."""
        self._bounds = mx.array(first, mx.int32), mx.array(count, mx.int32)

    def __call__(
        self,
        module: nn.Module,
        x: mx.array,
        indices: mx.array,
        groups: mx.array | None = None,
    ) -> mx.array:
        """Run a layer.

        Args:
            module: the layer.
            x: tokens [..., dim].
            indices: the whole model's expert indices, integer [..., k].
            groups: the assignments sorted by expert, if `few` takes these tokens and they are.

        Returns:
            [..., k, dim] with the type of the layer; zeros for experts of other ranks.
        """
        first, count = self._bounds
        self.experts_per_token = indices.shape[-1]
        tokens = indices.size // self.experts_per_token
        is_plain = math.prod(x.shape[:-1]) == tokens
        if self.few is not None and is_plain and self.few.takes(module, x, self.experts_per_token):
            if indices.ndim == 2:
                return self.few(module, x, indices, self.experts, groups)
            rows, chosen = x.reshape(tokens, -1), indices.reshape(tokens, -1)
            found = self.few(module, rows, chosen, self.experts, groups)
            return found.reshape(*indices.shape, -1)
        if not self.has_foreign:
            return self.run_plainly(module, x, indices)
        if _MAY_WAIT.get() and is_plain and tokens >= self.device_wait_tokens:
            return self._run_own(module, x, indices)
        substitute = mx.array(0, mx.int32)
        if indices.size < self._count:
            # Any expert that is read anyway. With more assignments, expert 0 most likely is.
            substitute = _local_or_zero(indices, first, count).max()
        local, mapped = _map_to_local(indices, first, count, substitute)
        y = self.run_plainly(module, x, mapped)
        return mx.where(local[..., None], y, mx.array(0, y.dtype))

    @property
    def has_foreign(self) -> bool:
        """Whether other ranks have experts of the layer."""
        return self._count < self.total

    def run_plainly(self, module: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
        """Run the layer by mlx-lm's code; `indices` count from the first local expert."""
        y: mx.array = self._original.__call__(module, x, indices)
        return y

    @property
    def device_wait_tokens(self) -> int:
        """The fewest tokens for which waiting for the device costs less than needless computing.

        Without the wait for the routing, the layer also computes tokens of other ranks' experts.
        """
        device = device_kind()
        least = LONG_TOKENS_CPU if device == "cpu" else LONG_TOKENS
        flops_per_token = 2 * self._expert_weights * self.experts_per_token
        return max(least, int(WAIT_FLOPS[device] / flops_per_token) + 1)

    def _run_own(self, module: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
        """Run only this rank's assignments, sorted by expert; shapes as in `__call__`."""
        first, count = self._bounds
        assignments, k = indices.size, indices.shape[-1]
        local, mapped = _map_to_local(indices.reshape(-1), first, count, count)
        by_expert = mx.argsort(mapped)
        own = _on_host(local.sum())
        rows = min(assignments, -(-max(1, own) // ROWS_MULTIPLE) * ROWS_MULTIPLE)
        taken = by_expert[:rows]
        # The padding rows are foreign assignments, whose results are dropped: use any expert.
        chosen = mx.minimum(mapped[taken], count - 1)
        tokens = x.reshape(-1, x.shape[-1])[taken // k]
        y = self.run_plainly(module, tokens, chosen[:, None])[:, 0]
        with_zeros = mx.concatenate([y, mx.zeros((1, y.shape[-1]), y.dtype)])
        places = mx.where(local, mx.argsort(by_expert), rows)
        return with_zeros[places].reshape(*indices.shape, y.shape[-1])


def _on_host(number: mx.array) -> int:
    """Wait for the device to compute an integer of shape []."""
    return int(number.item())  # type: ignore[arg-type]


@partial(mx.compile, shapeless=True)
def _local_or_zero(indices: mx.array, first: mx.array, count: mx.array) -> mx.array:
    """Return local expert indices, int32 with the shape of `indices`; 0 for foreign experts."""
    shifted = indices.astype(mx.int32) - first
    return mx.where((shifted >= 0) & (shifted < count), shifted, 0)


@partial(mx.compile, shapeless=True)
def _map_to_local(
    indices: mx.array, first: mx.array, count: mx.array, substitute: mx.array
) -> tuple[mx.array, mx.array]:
    """Map expert indices of the whole model to this rank's.

    Args:
        indices: integer, any shape.
        first: int32 [], the first local expert.
        count: int32 [], number of local experts.
        substitute: int32 [], the result for foreign experts.

    Returns:
        (bool: the expert is local, int32: local index), both with the shape of `indices`.
    """
    shifted = indices.astype(mx.int32) - first
    local = (shifted >= 0) & (shifted < count)
    return local, mx.where(local, shifted, substitute)
