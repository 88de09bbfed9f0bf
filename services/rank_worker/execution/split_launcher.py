"""Starts forwards in two parts on a device that takes more work than it does.

The host takes long to start a forward: 10 to 14 ms for 36 layers on CUDA, as long as a GPU computes
it. A step that is started whole behind the one before keeps the result of that one waiting, and the
plan that follows from it: 2 ms of 19 in which nobody started anything (16 rows, one H100). So half
of the layers are started, which the device computes while the result before is read and sent, and
then the rest.

Each part waits until the forward before it has computed its own. MLX writes an array in place only
where nothing else holds it, and what waits in a device's queue holds what it will read: a layer
that is started while the one before it still attends to the same rows copies all of them. MLX lets
the host be about ten CUDA graphs or command buffers ahead, which keeps deep models from it; of 8
layers with 10.7 GB of KV all was copied in every step (one H100: 3.5 to 5.6 ms instead of 2.4).
"""

import functools
from collections.abc import Callable, Sequence

import mlx.core as mx

from services.rank_worker.kv_cache.rows import KVStore

HALF = 0.5
"""Part of the layers that is started first. Whichever part the device computes must take it longer
than the host takes to start the other one."""


class SplitLauncher:
    """Starts the forwards over one store, in the order in which they were built."""

    def __init__(self, store: KVStore, *, in_parts: bool) -> None:
        """Begin with an idle device.

        Args:
            store: whose rows the forwards write.
            in_parts: the device has a queue; without one nothing else runs when a forward starts.
        """
        self._store = store
        self._in_parts = in_parts
        self._first: mx.array | None = None
        """Computed when the first part of the forward started last is. It shares no memory with
        what that part wrote, which a reference would keep from being written in place."""
        self._wait: Callable[[], object] | None = None
        """Waits for all that was started before."""

    def begin(self, finish_before: Callable[[], object] | None) -> None:
        """Begin a step.

        Args:
            finish_before: waits for the step before; None: nothing is left of it.
        """
        if finish_before is None:
            self._first = None
        self._wait = finish_before

    def forward(self, last: Sequence[mx.array]) -> None:
        """Start the forward that was built last.

        Args:
            last: what it ends in; all of it is computed when these are.
        """
        first = self._store.first_layers(HALF) if self._in_parts else None
        if first is None:
            mx.async_eval(*last)
            return
        self._wait_for_first()
        # A slice of the layer's array would be its memory.
        corner = first[:1, :1, :1, :1].reshape(-1)
        mark = mx.concatenate([corner, mx.zeros((1,), dtype=first.dtype)])
        del first, corner
        mx.async_eval(mark)
        self._wait_for_all()
        mx.async_eval(*last)
        self._first = mark
        self._wait = functools.partial(mx.eval, *last)

    def lose_track(self) -> None:
        """Take note that forwards were started otherwise: when a part is done is not known."""
        self._first = None

    def _wait_for_first(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            mx.eval(first)
        else:
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
