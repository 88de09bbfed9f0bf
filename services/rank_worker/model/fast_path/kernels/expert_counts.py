"""Counts of assignments to experts, on CUDA."""

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from services.rank_worker.model.fast_path.kernels.dialects import make_kernel
from services.rank_worker.model.fast_path.kernels.tensor_cores import HEADER

_THREADS = 128


class ExpertCounts:
    """Starts the kernel, one operation for all layers. Compiled kernels are kept by MLX."""

    def takes(self, experts: mx.array) -> bool:
        """Tell whether the kernel counts these: they were chosen by `RoutingKernels.route`."""
        return experts.ndim == 2 and experts.dtype == mx.int32

    def add(
        self,
        counts: mx.array,
        width: int,
        noted: Sequence[tuple[int, mx.array]],
        real: mx.array | None,
    ) -> mx.array:
        """Return the counts of all forwards with one more.

        Args:
            counts: uint32 [layers * width].
            width: numbers of each layer.
            noted: (index of a layer, its tokens' experts, int32 [tokens, k]); of one shape.
            real: bool with one number per token, false for those that do not count; None: all do.

        Returns:
            Like `counts`.
        """
        layers = counts.size // width
        places = [-1] * layers
        for place, (index, _) in enumerate(noted):
            places[index] = place
        counted: mx.array
        (counted,) = _kernel(len(noted))(
            inputs=[
                *(counts, _constant(tuple(places))),
                counts if real is None else real.reshape(-1),
                *(experts for _, experts in noted),
            ],
            template=[
                *(("WIDTH", width), ("TOP", noted[0][1].shape[-1])),
                *(("HAS_REAL", real is not None), ("THREADS", _THREADS)),
            ],
            grid=(layers * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[counts.shape],
            output_dtypes=[counts.dtype],
        )
        return counted


@functools.cache
def _kernel(layers: int) -> Any:
    """Return the kernel for the arrays of this number of layers."""
    names = [f"experts{place}" for place in range(layers)]
    return make_kernel(
        "cuda",
        "experts/count_experts",
        ["counts", "places", "real", *names],
        ["counted"],
        header=HEADER,
        start=f"const int* given[] = {{{', '.join(names)}}};\n",
        suffix=f"_{layers}",
    )


@functools.cache
def _constant(numbers: tuple[int, ...]) -> mx.array:
    return mx.array(numbers, dtype=mx.int32)
