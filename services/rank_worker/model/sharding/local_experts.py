"""Runs the routed experts that this rank holds, and gives zeros for all others.

Every rank has every token, and every rank's router picks the same experts. A layer of experts takes
tokens and, for each, the experts that it was routed to; a slot is one such pair. Slots of experts
that live elsewhere (foreign slots) must come out as zeros, so that the sum over ranks is what one
rank would have computed, and they should cost nothing.

Shapes within a graph cannot depend on numbers that are not computed yet. So there are two ways:

- Short forwards (decodes) compute a foreign slot with an expert that this rank reads anyway for
  another slot, and drop the result. Reading experts is what costs time there: a slot more of an
  expert that is read costs next to nothing.
- Long forwards (prefill) spend their time on arithmetic, and with N ranks all but 1/N of the slots
  are foreign. There the host waits for the number of this rank's slots and computes no others. That
  is the only place where a forward waits for the device; it pays only where the arithmetic of the
  foreign slots takes longer than the wait (`WAIT_FLOPS`). What other ranks do at that place does
  not matter: the shape of what is summed up is the same either way.

Only a prefill may wait (`may_wait`): decodes are built ahead of the device, however many rows they
have. And whoever waits waits for all that was started before, so such a prefill is not started
ahead either (`wait_tokens`).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from services.rank_worker.device.hardware import device_kind

LONG_TOKENS = 256
"""Forwards with fewer tokens never wait: reading experts is what takes time there."""
LONG_TOKENS_CPU = 32

WAIT_FLOPS = {"cpu": 1e7, "metal": 5e9, "cuda": 1e12}
"""Arithmetic of all slots above which waiting for the host once is the lesser evil. Measured on two
H200s with a layer of Qwen3-30B-A3B: 1.5e11 take 3.7 ms without and 4.3 ms with the wait."""

ROWS_MULTIPLE = 64
"""Slots of this rank are rounded up to it, so that sizes of arrays recur."""

_MAY_WAIT: ContextVar[bool] = ContextVar("may_wait", default=False)


@contextmanager
def may_wait() -> Iterator[None]:
    """Let forwards that are built within wait for the device, where that pays: a prefill's."""
    before = _MAY_WAIT.set(True)
    try:
        yield
    finally:
        _MAY_WAIT.reset(before)


def wait_tokens(model: nn.Module) -> int | None:
    """Return from how many tokens on a forward that may wait does; None: none does.

    Args:
        model: has been called once, so that its routers have shown how many experts they pick.
    """
    layers = [getattr(type(module), "local_experts", None) for module in model.modules()]
    return min((one.wait_tokens for one in layers if one is not None), default=None)


def keep_local(experts: nn.Module, first: int, stop: int) -> None:
    """Keep experts [first, stop) of a layer, and make it give zeros for the others.

    Args:
        experts: called with tokens [..., dim] and expert numbers [..., k] of the same leading
            shape, returns [..., k, dim]: `SwitchGLU` and its kin. Its parameters have the experts
            as first axis; they may be lazy, and are only sliced.
        first: the first expert kept.
        stop: the one behind the last.
    """
    for child in experts.children().values():
        if is_switch(child):
            for name, value in child.items():
                if isinstance(value, mx.array):
                    child[name] = value[first:stop]
    numbers = sum(
        child.input_dims * child.output_dims
        for child in experts.children().values()
        if is_switch(child)
    )
    original = type(experts)
    local = LocalExperts(original, first, stop - first, numbers)

    def call(module: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
        return local(module, x, indices)

    # A subclass, because Python looks `__call__` up on the type: parameters keep their names.
    names = {"__call__": call, "local_experts": local}
    experts.__class__ = type(original.__name__, (original,), names)


def is_switch(module: Any) -> bool:
    """Tell whether a module is one matrix per expert, quantized or not."""
    return isinstance(module, SwitchLinear | QuantizedSwitchLinear)


class LocalExperts:
    """How a layer of experts is called on a rank that holds some of them."""

    def __init__(self, original: type[nn.Module], first: int, count: int, numbers: int) -> None:
        """Remember which experts there are.

        Args:
            original: the layer's type; runs experts 0 to count - 1.
            first: what the model calls the first of them.
            count: how many there are here.
            numbers: weights of one expert.
        """
        self._original = original
        self._count = count
        self._numbers = numbers
        self._picked = 1
        self._bounds = mx.array(first, mx.int32), mx.array(count, mx.int32)

    def __call__(self, module: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
        """Run a layer.

        Args:
            module: the layer.
            x: [..., dim].
            indices: expert numbers of the whole model, [..., k].

        Returns:
            [..., k, dim]; zeros where the expert is on another rank.
        """
        first, count = self._bounds
        self._picked = indices.shape[-1]
        tokens = indices.size // self._picked
        is_plain = math.prod(x.shape[:-1]) == tokens
        if _MAY_WAIT.get() and is_plain and tokens >= self.wait_tokens:
            return self._run_own(module, x, indices, first, count)
        here = mx.array(0, mx.int32)
        if indices.size < self._count:
            # Any expert that is read anyway. With more slots the first one is, most likely.
            here = _numbers_here(indices, first, count).max()
        local, mapped = _mapped(indices, first, count, here)
        y: mx.array = self._original.__call__(module, x, mapped)
        return mx.where(local[..., None], y, mx.array(0, y.dtype))

    @property
    def wait_tokens(self) -> int:
        """From so many tokens on foreign slots take longer than to wait for how many there are."""
        device = device_kind()
        least = LONG_TOKENS_CPU if device == "cpu" else LONG_TOKENS
        return max(least, int(WAIT_FLOPS[device] / (2 * self._numbers * self._picked)) + 1)

    def _run_own(
        self, module: nn.Module, x: mx.array, indices: mx.array, first: mx.array, count: mx.array
    ) -> mx.array:
        """Run the slots of this rank only, neighbours by expert."""
        slots, k = indices.size, indices.shape[-1]
        local, mapped = _mapped(indices.reshape(-1), first, count, count)
        order = mx.argsort(mapped)
        own = _on_host(local.sum())
        rows = min(slots, -(-max(1, own) // ROWS_MULTIPLE) * ROWS_MULTIPLE)
        taken = order[:rows]
        # What fills up the rows is foreign: any expert will do for it.
        chosen = mx.minimum(mapped[taken], count - 1)
        tokens = x.reshape(-1, x.shape[-1])[taken // k]
        y = self._original.__call__(module, tokens, chosen[:, None])[:, 0]
        with_zeros = mx.concatenate([y, mx.zeros((1, y.shape[-1]), y.dtype)])
        places = mx.where(local, mx.argsort(order), rows)
        return with_zeros[places].reshape(*indices.shape, y.shape[-1])


def _on_host(number: mx.array) -> int:
    """Wait for an integer; nothing else here waits."""
    return int(number.item())  # type: ignore[arg-type]


@partial(mx.compile, shapeless=True)
def _numbers_here(indices: mx.array, first: mx.array, count: mx.array) -> mx.array:
    numbers = indices.astype(mx.int32) - first
    return mx.where((numbers >= 0) & (numbers < count), numbers, 0)


@partial(mx.compile, shapeless=True)
def _mapped(
    indices: mx.array, first: mx.array, count: mx.array, elsewhere: mx.array
) -> tuple[mx.array, mx.array]:
    """Return which slots are this rank's, and its own number of each one's expert."""
    numbers = indices.astype(mx.int32) - first
    local = (numbers >= 0) & (numbers < count)
    return local, mx.where(local, numbers, elsewhere)
