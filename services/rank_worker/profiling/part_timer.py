"""Times of the parts of one step. Owns the runs of parts while the step is measured.

The device computes while the host builds the graph, and nothing tells afterwards which operation
took how long. So a measured step waits for the device where a part begins and where it ends.
"""

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from shared.clock import Clock
from shared.messages.telemetry.step_profile import (
    NO_LAYER,
    PARTS,
    SPANS_MAX,
    Part,
    PartTotal,
    Span,
    StepProfile,
    pack_spans,
)

_NODE = "label ="
"""Begins the name of an operation in a graph that MLX exports."""


@dataclasses.dataclass(slots=True)
class _Total:
    runs: int = 0
    seconds: float = 0.0
    bytes: int = 0
    primitives: int = 0


class PartTimer:
    """Divides the time of one step between its parts; waits for the device at every boundary."""

    def __init__(self, clock: Clock, *, counts_primitives: bool) -> None:
        """Begin the step now, in the part `host`.

        Args:
            clock: measures times.
            counts_primitives: count the operations of each part, in time that does not count.
        """
        self._clock = clock
        self._counts_primitives = counts_primitives
        self._began_s = self._last_s = clock.now()
        self._not_counted_s = 0.0
        self._open: list[tuple[Part, int]] = [("host", NO_LAYER)]
        """The parts that run now, outermost first."""
        self._totals = {part: _Total() for part in PARTS}
        self._totals["host"].runs = 1
        self._spans: list[Span] = []
        self._chosen: list[tuple[Part, int, mx.array, range]] = []

    @contextlib.contextmanager
    def part(self, part: Part, layer: int = NO_LAYER) -> Iterator[None]:
        """Count the time of the block to a part.

        The caller waits (`wait`) for the arrays that it has begun, before the block and at its end.

        Args:
            part: the part.
            layer: of the model; NO_LAYER: that of the part around it.
        """
        layer = layer if layer != NO_LAYER else self._open[-1][1]
        began_s = self._mark()
        self._open.append((part, layer))
        try:
            yield
        finally:
            ended_s = self._mark()
            self._open.pop()
            self._totals[part].runs += 1
            if len(self._spans) < SPANS_MAX:
                self._spans.append(Span(part, layer, began_s - self._began_s, ended_s - began_s))

    def wait(self, *values: Any) -> None:
        """Wait until the device has computed all arrays in these values.

        Args:
            values: arrays, or containers of them at any depth; other values are passed over.
        """
        leaves: Any = tree_flatten(values)
        arrays = [one for _, one in leaves if isinstance(one, mx.array)]
        if self._counts_primitives and arrays:
            self._count_primitives(arrays)
        mx.eval(arrays)

    def call(
        self, part: Part, layer: int, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function as a run of a part, from computed arguments to computed results."""
        self.wait(args, kwargs)
        with self.part(part, layer):
            result = function(*args, **kwargs)
            self.wait(result)
        return result

    def add_bytes(self, part: Part, count: int) -> None:
        """Add bytes that a part has moved."""
        self._totals[part].bytes += count

    def add_chosen_bytes(self, part: Part, count: int, chosen: mx.array, own: range) -> None:
        """Add the bytes of those matrices that a part reads.

        Args:
            part: the part.
            count: bytes of one matrix.
            chosen: numbers of matrices, integers of any shape; counted when the step has ended.
            own: numbers of the matrices that this rank has.
        """
        self._chosen.append((part, count, chosen, own))

    def finish(
        self, rank: int, step_id: int, kv_bytes: int, bytes_per_s: float = 0.0
    ) -> StepProfile:
        """End the step now and return its profile.

        Args:
            rank: this rank.
            step_id: id of the step.
            kv_bytes: bytes of keys and values that its attention reads.
            bytes_per_s: what the device can move, 0 if that is not known.
        """
        seconds = self._mark() - self._began_s
        for part, count, chosen, own in self._chosen:
            numbers = np.unique(np.array(chosen).astype(np.int64))
            read = int(np.count_nonzero((numbers >= own.start) & (numbers < own.stop)))
            self.add_bytes(part, count * read)
        return StepProfile(
            rank=rank,
            step_id=step_id,
            began_s=self._began_s,
            seconds=seconds,
            kv_bytes=kv_bytes,
            parts=[
                PartTotal(
                    part=part,
                    runs=one.runs,
                    seconds=max(0.0, one.seconds),
                    bytes=one.bytes,
                    primitives=one.primitives,
                )
                for part, one in self._totals.items()
                if one.runs
            ],
            spans=pack_spans(self._spans),
            bytes_per_s=bytes_per_s,
        )

    def _mark(self) -> float:
        """Count the time since the last mark to the innermost part; return the time."""
        now_s = self._clock.now() - self._not_counted_s
        self._totals[self._open[-1][0]].seconds += now_s - self._last_s
        self._last_s = now_s
        return now_s

    def _count_primitives(self, arrays: list[mx.array]) -> None:
        began_s = self._clock.now()
        self._totals[self._open[-1][0]].primitives += count_primitives(arrays)
        self._not_counted_s += self._clock.now() - began_s


def count_primitives(arrays: Sequence[mx.array]) -> int:
    """Return the number of operations that an evaluation of these arrays runs; evaluates nothing.

    A compiled function's fused operations count as one, and so does one with several results.

    Args:
        arrays: lazy or computed, of any shapes.
    """
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return graph.getvalue().count(_NODE)
