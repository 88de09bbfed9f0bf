"""Launcher of forwards in two parts, on devices with a work queue.

The host takes long to start a forward: 10 to 14 ms for 36 layers on CUDA, as long as a GPU computes
it. Starting a whole step behind the previous one delays the result of that step, and so the plan
that follows from it: the device idles 2 ms of 19 (16 rows, one H100). So the first half of the
layers is started, the previous result is read and sent while the device computes them, and then the
rest is started.

Each part waits until the forward before it has computed the same part. MLX writes an array in place
only if nothing else references it, and work in a device's queue references its inputs: a layer that
is started while the previous forward still attends to the same rows would copy all of them. MLX
limits the host to about ten CUDA graphs or command buffers ahead, which protects deep models. With
8 layers and 10.7 GB of KV every step copied everything (one H100: 3.5 to 5.6 ms instead of 2.4).
"""

import functools
from collections.abc import Callable, Sequence

import mlx.core as mx

from services.rank_worker.kv_cache.rows.interface import KVStore

FIRST_LAYERS_SHARE = 0.5
"""Part of the layers that is started first. The device must take longer to compute either part than
the host takes to start the other."""


class SplitLauncher:
    """Starts forwards in the order in which they are built, on GPUs in two parts where rows allow.

    While the GPU computes the first part, the host waits for the work before it, so that the
    previous step's result is sent early; then it starts the second part.
    """

    def __init__(self, store: KVStore, *, in_parts: bool) -> None:
        """Set up a launcher for a device that has no work.

        Args:
            store: the rows that the forwards write.
            in_parts: whether the device has a work queue; without one forwards are started whole.
        """
        self._store = store
        self.in_parts = in_parts
        """Whether the device has a work queue, so that the host can work while it computes."""
        self._first_part: mx.array | None = None
        """Evaluated with the first part of the last forward. It shares no memory with the rows: a
        reference to a row would prevent MLX from writing it in place."""
        self._wait: Callable[[], object] | None = None
        """Waits for all work that was started before."""
        self._finish_before: Callable[[], object] | None = None
        """Finishes the previous step; None once it was called."""
        self._when_finished: Callable[[], object] | None = None
        """Called once the previous step is finished."""
        self._has_prefill = False
        """A prefill of this step was started."""

    def begin(self, finish_before: Callable[[], object] | None) -> None:
        """Begin a step, whose forwards `start_forward` then starts.

        Args:
            finish_before: waits for the previous step and sends its result; the first
                `start_forward` with two parts calls it between them. None: that step is finished.
        """
        self._has_prefill = False
        if finish_before is None:
            self._first_part = None
        self._wait = self._finish_before = finish_before
        self._when_finished = None

    def when_previous_step_is_finished(self, callback: Callable[[], object]) -> None:
        """Call a function as soon as the previous step is finished, at once if it is already.

        Args:
            callback: what needs that step's tokens. It must not wait: the second part of a forward
                is started after it.
        """
        if self._finish_before is None:
            callback()
        else:
            self._when_finished = callback

    def finish_previous_step(self) -> None:
        """Finish the previous step now, unless a forward of this step has already done so."""
        if self._finish_before is not None:
            self._wait_for_all()

    def start_prefill(self, outputs: Sequence[mx.array]) -> None:
        """Start a prefill; before the second one of a step, the previous step is finished.

        Otherwise, if forwards start whole, its result would wait until all of them are started.

        Args:
            outputs: as for `start_forward`.
        """
        if self._has_prefill:
            self.finish_previous_step()
        self._has_prefill = True
        self.start_forward(outputs)

    def start_forward(self, outputs: Sequence[mx.array]) -> None:
        """Start the forward that was built last, in two parts if the device has a work queue.

        It starts whole where `KVStore.early_layer_keys` is None. Between the parts it waits for all
        forwards that were started before.

        Args:
            outputs: arrays whose evaluation computes the whole forward.
        """
        early_layer_keys = (
            self._store.early_layer_keys(FIRST_LAYERS_SHARE) if self.in_parts else None
        )
        if early_layer_keys is None:
            # Rows that are written in place are never copied, so nothing needs to be waited for.
            mx.async_eval(*outputs)
            self.forget_progress()
            return
        self._wait_for_first_part()
        # A slice would share the memory of the layer's array.
        corner = early_layer_keys[:1, :1, :1, :1].reshape(-1)
        marker = mx.concatenate([corner, mx.zeros((1,), dtype=early_layer_keys.dtype)])
        del early_layer_keys, corner
        mx.async_eval(marker)
        self._wait_for_all()
        mx.async_eval(*outputs)
        self._first_part = marker
        self._wait = functools.partial(mx.eval, *outputs)

    def forget_progress(self) -> None:
        """Make the next forward wait for all earlier work before its first part starts.

        To be called after a forward was started without this launcher. Otherwise the next forward
        waits only until the device has computed the first part of the last one.
        """
        self._first_part = None

    def _wait_for_first_part(self) -> None:
        first_part, self._first_part = self._first_part, None
        if first_part is not None:
            mx.eval(first_part)
        else:
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        wait, self._wait = self._wait, None
        # It is called before anything else that `start_forward` waits for.
        self._finish_before = None
        if wait is not None:
            wait()
        callback, self._when_finished = self._when_finished, None
        if callback is not None:
            callback()
