"""Counts, on the device, how many tokens each routed expert gets. Owns the counts of one rank.

A pair of a token and an expert that it is routed to is called an assignment. Each forward adds its
own to one array, as part of its graph, so nothing waits for the device. The host reads that array
once in some steps, with the results of the step.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx import nn

from services.rank_worker.model.sharding.local_experts import is_expert_layer, is_switch
from services.rank_worker.model.sharding.module_paths import LAYER, OTHER_MODEL
from shared.messages import JoinWorld, LayerAssignments
from shared.messages.base import Sharding

Counts = np.ndarray[Any, np.dtype[np.uint64]]


class CountKernel(Protocol):
    """Adds the assignments of all layers in one operation."""

    def takes(self, experts: mx.array) -> bool:
        """Tell whether it counts arrays like this one, integer [..., k]."""

    def add(
        self,
        counts: mx.array,
        width: int,
        noted: Sequence[tuple[int, mx.array]],
        real: mx.array | None,
    ) -> mx.array:
        """Return `counts` with the assignments of these layers.

        Args:
            counts: uint32 [layers * width], of all forwards before.
            width: numbers of each layer.
            noted: (index of a layer, experts of its tokens), of one shape that it takes.
            real: bool [rows, count], true for the tokens that count; None: all do.
        """


class ExpertCounter:
    """Counts the assignments of all forwards to the experts of each layer of this rank's shard."""

    def __init__(self, model: nn.Module, rank: int, sharding: Sharding, every_steps: int) -> None:
        """Find the layers of experts, and have their calls noted.

        Args:
            model: this rank's shard; the classes of its layers of experts are replaced.
            rank: this rank.
            sharding: how the model is split.
            every_steps: a step whose id is a multiple of it is read.
        """
        self._every = every_steps
        layers = list(_find_layers(model))
        self._numbers = [number for number, _ in layers]
        self._local = [getattr(type(module), "local_experts", None) for _, module in layers]
        self._totals = [_expert_total(module) for _, module in layers]
        self._width = max(self._totals, default=0)
        # The first ranks of a pipeline compute their last layer for the next rank.
        has_end = sharding != "pipeline" or rank == 0
        self._end_layer = max(_layer_numbers(model), default=-1) if has_end else None
        """The last layer of the whole model, whose experts only logits depend on."""
        self._noted: list[tuple[int, mx.array]] = []
        """Index of the layer, and the experts of its tokens, integer [..., k], of one forward."""
        self.kernel: CountKernel | None = None
        """Adds assignments where it can; None: MLX's operations do."""
        self._counts = self._zeros()
        """uint32 [layers * width], not computed yet; wraps around."""
        self._is_new = False
        """Whether a forward was counted since `take_new`."""
        self._last_read = np.zeros((len(layers), self._width), dtype=np.uint32)
        self.counts: Counts = np.zeros((len(layers), self._width), dtype=np.uint64)
        """[layers, experts], assignments until the last read; replaced, never changed."""
        for index, (_, module) in enumerate(layers):
            self._note_calls(index, module)

    @property
    def has_layers(self) -> bool:
        """Whether the shard has layers of routed experts."""
        return bool(self._numbers)

    def restart(self) -> None:
        """Start again at 0, as after the warm-up."""
        self._counts = self._zeros()
        self._is_new = False
        self._last_read = np.zeros_like(self._last_read)
        self.counts = np.zeros_like(self.counts)

    @contextlib.contextmanager
    def forward(self, real: mx.array | None, *, fills: bool) -> Iterator[None]:
        """Count the assignments of the forward that is built within the block.

        Args:
            real: bool [rows, count], true for the tokens that count; None: all do.
            fills: the forward only fills caches, so that the model's last layer has no results.
        """
        self._noted.clear()
        yield
        noted, self._noted = self._noted, []
        if fills:
            # To count them would have them computed.
            noted = [one for one in noted if self._numbers[one[0]] != self._end_layer]
        if real is not None:
            noted = [one for one in noted if one[1].size == real.size * one[1].shape[-1]]
        for shape, group in itertools.groupby(noted, lambda one: one[1].shape):
            self._add([*group], shape[-1], real)
            self._is_new = True

    def take_noted(self) -> list[tuple[int, mx.array]]:
        """Return the calls since the forward began, and forget them.

        A graph that MLX compiles has them as results, and `note` gets these in each forward.

        Returns:
            (index of the layer among those of experts, experts of its tokens, integer [..., k]).
        """
        noted = self._noted.copy()
        self._noted.clear()
        return noted

    def note(self, calls: Iterable[tuple[int, mx.array]]) -> None:
        """Note calls of the forward that is being built, as `take_noted` returned them."""
        self._noted.extend(calls)

    def take_new(self, step_id: int) -> tuple[mx.array | None, bool]:
        """Return the counts to compute with a step, and whether they are read at its end.

        Args:
            step_id: id of the step.

        Returns:
            None if no forward was counted since the last call.
        """
        if not self._is_new:
            return None, False
        self._is_new = False
        return self._counts, step_id % self._every == 0

    def read(self, counts: mx.array) -> None:
        """Add the assignments since the last read; waits until `counts` are computed.

        Args:
            counts: as `take_new` returned them.
        """
        now: np.ndarray[Any, Any] = np.array(counts).reshape(self.counts.shape)
        # Unsigned numbers: right also after the device's have wrapped around.
        new: Counts = (now - self._last_read).astype(np.uint64)
        self.counts = self.counts + new
        self._last_read = now

    def read_now(self) -> None:
        """Read the counts of all forwards so far; waits for the device."""
        self.read(self._counts)

    def report(self, before: Counts | None = None) -> tuple[list[LayerAssignments], Counts]:
        """Return the read assignments to this rank's experts. Another thread may read meanwhile.

        Args:
            before: an earlier value of `counts`, whose assignments are left out.

        Returns:
            (assignments by layer, the value of `counts` that they are taken from).
        """
        now = self.counts
        counts = now if before is None else now - before
        found = []
        for number, local, total, row in zip(
            self._numbers, self._local, self._totals, counts, strict=True
        ):
            own = local.experts if local is not None else range(total)
            own_counts = row[own.start : own.stop].tolist()
            found.append(
                LayerAssignments(layer=number, experts=total, first=own.start, counts=own_counts)
            )
        return found, now

    def _zeros(self) -> mx.array:
        return mx.zeros((len(self._numbers) * self._width,), dtype=mx.uint32)

    def _add(self, noted: list[tuple[int, mx.array]], k: int, real: mx.array | None) -> None:
        """Add the assignments of layers with one shape [..., k]."""
        if self.kernel is not None and self.kernel.takes(noted[0][1]):
            self._counts = self.kernel.add(self._counts, self._width, noted, real)
            return
        size = noted[0][1].size
        experts = mx.concatenate([experts for _, experts in noted]).reshape(len(noted), size)
        rows = mx.array([[index * self._width] for index, _ in noted], dtype=mx.uint32)
        places = _places(experts, rows, mx.array(self._width - 1, dtype=mx.uint32))
        if real is None:
            added = mx.array(1, dtype=mx.uint32)
        else:
            added = mx.repeat(real.reshape(-1).astype(mx.uint32), k)[None]
        self._counts = self._counts.at[places].add(added)

    def _note_calls(self, index: int, module: nn.Module) -> None:
        """Have each call of a layer of experts note which experts it is given."""
        original: Any = type(module)

        def call(one: nn.Module, x: mx.array, indices: mx.array, *args: Any) -> mx.array:
            self._noted.append((index, indices))
            result: mx.array = original.__call__(one, x, indices, *args)
            return result

        module.__class__ = type(original.__name__, (original,), {"__call__": call})


@functools.partial(mx.compile, shapeless=True)
def _places(experts: mx.array, rows: mx.array, last: mx.array) -> mx.array:
    """Return flat indices: uint32 with the shape of `experts`, [layers, any].

    Args:
        experts: integer [layers, any].
        rows: uint32 [layers, 1], index of each layer's first expert.
        last: uint32 [], the highest number of an expert; a higher one, of which mlx-lm has made a
            token's exclusion, must not reach another layer's counts.
    """
    return mx.minimum(experts.astype(mx.uint32), last) + rows


def open_expert_counter(model: nn.Module, order: JoinWorld) -> ExpertCounter | None:
    """Return the counter of a rank's assignments to experts; None if this rank counts none.

    Ranks that divide every matrix have the same assignments, so only the first counts.

    Args:
        model: this rank's shard.
        order: the order to join the world.
    """
    if not order.experts_every_steps or (order.sharding == "tensor" and order.rank):
        return None
    counter = ExpertCounter(model, order.rank, order.sharding, order.experts_every_steps)
    return counter if counter.has_layers else None


def _find_layers(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield (number of the decoder layer, layer of experts) in the order of layers."""
    found = []
    for path, module in model.named_modules():
        if not is_expert_layer(module) or OTHER_MODEL.search(path):
            continue
        if (number := _layer_of(path)) is not None:
            found.append((number, module))
    yield from sorted(found, key=lambda one: one[0])


def _layer_numbers(model: nn.Module) -> Iterator[int]:
    for path, _ in model.named_modules():
        if (number := _layer_of(path)) is not None and not OTHER_MODEL.search(path):
            yield number


def _layer_of(path: str) -> int | None:
    """Return the number of the decoder layer that a path leads to or through; None without one."""
    parts = path.split(".")
    for length in range(2, len(parts) + 1):
        if found := LAYER.search(".".join(parts[:length])):
            return int(found[1])
    return None


def _expert_total(module: nn.Module) -> int:
    """Return the number of a layer's experts, on all ranks together."""
    local = getattr(type(module), "local_experts", None)
    if local is not None:
        return int(local.total)
    return next(int(one.num_experts) for one in module.children().values() if is_switch(one))
