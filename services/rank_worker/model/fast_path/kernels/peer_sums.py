"""Sums of rows over the ranks of a host, with the norm that follows, in one kernel (CUDA only).

A collective is an operation of its own, which the host starts apart from others, and takes several
times as long as the sum of a few rows. All ranks write their part to memory that the others read.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from services.rank_worker.model.fast_path.kernels.dialects import (
    CUDA,
    start_norm,
    vector_size,
)
from services.rank_worker.model.fast_path.kernels.routing import (
    ExpertResults,
    sum_inputs,
    sum_template,
)
from services.rank_worker.model.fast_path.kernels.tensor_cores import cuda_kernel
from services.rank_worker.peers.peer_memory import OpenPeerMemory, PeerMemory

ROWS_MAX = 256
"""Most rows of a sum. Each rank reads the parts of all others, while a collective divides the work
of many rows."""
RANKS_MAX = 32
"""Most ranks: a group tells each of them by a thread of its own."""
_WORD_BYTES = 4
_TRIED_ROWS = (1, 3, ROWS_MAX, 1)
_TOLERANCE = 0.02
"""Of a sum of numbers near 1 with 16 bits."""

HEADER = (
    CUDA.header
    + """
#define TELL(address, number) \\
  asm volatile("fence.acq_rel.sys; st.relaxed.sys.global.u32 [%0], %1;" \\
      :: "l"(address), "r"(number) : "memory")
#define HEARD(address) lockstep_heard(address)
static __device__ __forceinline__ unsigned lockstep_heard(const unsigned* address) {
  unsigned number;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(number) : "l"(address) : "memory");
  return number;
}
"""
)
"""Definitions before a kernel's function."""


def open_peer_sums(
    open_memory: OpenPeerMemory,
    all_agree: Callable[[bool], bool],
    ranks: int,
    dim: int,
    dtype: mx.Dtype,
) -> tuple["PeerSums | None", str]:
    """Open memory for the sums of all ranks, and try them. All ranks call it together.

    Args:
        open_memory: opens it.
        all_agree: tells whether a statement holds on all ranks; a collective.
        ranks: number of ranks.
        dim: numbers of a row.
        dtype: of the numbers.

    Returns:
        The sums; or None, and why they cannot be used.
    """
    if ranks > RANKS_MAX:
        return None, f"there are more than {RANKS_MAX} ranks"
    words = ROWS_MAX * (ranks + 1)
    memory, fault = open_memory(2 * ROWS_MAX * dim * dtype.size + words * _WORD_BYTES)
    if memory is None:
        return None, fault
    sums = PeerSums(memory)
    fault = sums.find_compiler_fault(dim, dtype)
    # A rank without kernels would be waited for.
    if not all_agree(not fault):
        return None, fault or "another rank has no kernels"
    fault = sums.find_difference(dim, dtype)
    if not all_agree(not fault):
        return None, fault or "a difference on another rank"
    return sums, ""


class PeerSums:
    """Starts the kernels. All ranks start the same ones in the same order."""

    def __init__(self, memory: PeerMemory) -> None:
        """Use memory that is as large as `open_peer_sums` makes it."""
        self._rank, self._ranks = memory.rank, len(memory.addresses)
        self._memories = mx.array(np.array(memory.addresses, dtype=np.uint64))
        mx.eval(self._memories)
        outputs = ["added", "normalized"]
        names = ["change", "input", "weight", "constants", "memories"]
        self._sum_norm = cuda_kernel("peers/sum_norm", names, outputs, header=HEADER)
        results = ["product", "weights", "shared", "gate"]
        self._sum_experts_norm = cuda_kernel(
            "peers/sum_experts_norm", [*results, *names[1:]], outputs, header=HEADER
        )

    def takes(self, rows: int) -> bool:
        """Tell whether a sum may have this many rows."""
        return rows <= ROWS_MAX

    def add_norm(
        self, hidden: mx.array, change: mx.array, weight: mx.array, epsilon: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Add up a layer's output over ranks, add it to its input, and normalize the sum.

        Args:
            hidden: [rows, dim], equal on all ranks.
            change: this rank's part of the output, like `hidden`.
            weight: [dim], of the norm.
            epsilon: float32 [1], of the norm.

        Returns:
            (sum, normalized sum), both like `hidden`, to the bit the same on all ranks.
        """
        inputs = [change, hidden, weight, epsilon, self._memories]
        return start_norm(self._sum_norm, inputs, self._template(hidden), hidden)

    def add_experts_norm(
        self, hidden: mx.array, results: ExpertResults, weight: mx.array, epsilon: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Add up the results of each token's experts, and go on as `add_norm`.

        Args:
            hidden: [tokens, dim], equal on all ranks, in the dtype of the results.
            results: of this rank's experts, or of its part of all.
            weight: as for `add_norm`.
            epsilon: as for `add_norm`.
        """
        inputs = [*sum_inputs(results), hidden, weight, epsilon, self._memories]
        template = [*sum_template(results), *self._of_ranks()]
        return start_norm(self._sum_experts_norm, inputs, template, hidden)

    def find_compiler_fault(self, dim: int, dtype: mx.Dtype) -> str:
        """Have `add_norm` compiled without an exchange; return why it cannot be, or ""."""
        memories, self._memories = self._memories, mx.zeros_like(self._memories)
        hidden, epsilon = mx.ones((1, dim), dtype=dtype), mx.zeros((1,), dtype=mx.float32)
        try:
            mx.eval(self.add_norm(hidden, hidden, hidden[0], epsilon))
        except (RuntimeError, ValueError) as error:
            return str(error).splitlines()[0]
        finally:
            self._memories = memories
        return ""

    def find_difference(self, dim: int, dtype: mx.Dtype) -> str:
        """Sum numbers that all ranks know; return the fault, or "". A collective."""
        weight, epsilon = mx.ones((dim,), dtype=dtype), mx.zeros((1,), dtype=mx.float32)
        fault = ""
        # To the end, also after a difference: the other ranks wait for this one's parts.
        for number, rows in enumerate(_TRIED_ROWS):
            keys = [mx.random.key(number * self._ranks + rank) for rank in range(self._ranks)]
            parts = [mx.random.normal((rows, dim), key=key).astype(dtype) for key in keys]
            expected = mx.stack(parts).astype(mx.float32).sum(axis=0)
            added, _ = self.add_norm(mx.zeros_like(parts[0]), parts[self._rank], weight, epsilon)
            if not mx.allclose(added.astype(mx.float32), expected, _TOLERANCE, _TOLERANCE).item():
                fault = f"a sum of {rows} rows differs"
        return fault

    def _template(self, hidden: mx.array) -> list[tuple[str, Any]]:
        dim = hidden.shape[-1]
        vector = vector_size(dim, hidden.dtype)
        return [("T", hidden.dtype), ("DIM", dim), ("VECTOR_SIZE", vector), *self._of_ranks()]

    def _of_ranks(self) -> list[tuple[str, Any]]:
        return [("RANK", self._rank), ("RANKS", self._ranks), ("ROWS_MAX", ROWS_MAX)]
