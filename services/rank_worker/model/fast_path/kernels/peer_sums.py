"""Sums of rows over the ranks of a host, with the norm that follows, in one kernel (CUDA only).

A collective is an operation of its own, which the host starts apart from others, and takes several
times as long as the sum of a few rows. Each rank writes its summand to memory that the others read.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from services.rank_worker.model.fast_path.kernels.dialects import (
    CUDA,
    make_kernel,
    start_norm,
    vector_size,
)
from services.rank_worker.model.fast_path.kernels.faults import first_error
from services.rank_worker.model.fast_path.kernels.routing import (
    ExpertResults,
    sum_inputs,
    sum_template,
)
from services.rank_worker.peers.peer_memory import OpenPeerMemory, PeerMemory

SUMMED_ROWS_MAX = 256
"""Most rows of a sum. Each rank reads the summands of all others, while a collective divides the
work of many rows."""
RANKS_MAX = 32
"""Most ranks: thread r of a group of at least 32 threads signals rank r."""
_WORD_BYTES = 4
_TRIED_ROWS = (1, 3, SUMMED_ROWS_MAX, 1)
_POLLS_MAX = 1 << 62
"""While the model serves, the watchdog ends a rank that waits too long."""
TRIED_POLLS = 10_000_000
"""Some seconds; a poll takes about a microsecond."""
_TOLERANCE = 0.02
"""Of a sum of numbers near 1 with 16 bits."""

HEADER = (
    CUDA.header
    + """
#define STORE_RELEASE(address, number) \\
  asm volatile("fence.acq_rel.sys; st.relaxed.sys.global.u32 [%0], %1;" \\
      :: "l"(address), "r"(number) : "memory")
#define LOAD_ACQUIRE(address) lockstep_load_acquire(address)
static __device__ __forceinline__ unsigned lockstep_load_acquire(const unsigned* address) {
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
    """Open memory for sums over ranks, and try them. All ranks call it together.

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
    words = SUMMED_ROWS_MAX * (ranks + 1)
    memory, fault = open_memory(2 * SUMMED_ROWS_MAX * dim * dtype.size + words * _WORD_BYTES)
    if memory is None:
        return None, fault
    sums = PeerSums(memory, dim, dtype)
    fault = sums.find_compiler_fault()
    # The other ranks would wait in their kernel for a rank that has none.
    if not all_agree(not fault):
        return None, fault or "another rank cannot run the kernels"
    fault = sums.find_difference(all_agree)
    if not all_agree(not fault):
        return None, fault or "a difference on another rank"
    return sums, ""


class PeerSums:
    """Starts the kernels. All ranks start the same ones in the same order."""

    def __init__(self, memory: PeerMemory, dim: int, dtype: mx.Dtype) -> None:
        """Use memory that is as large as `open_peer_sums` makes it; arguments as there."""
        self._rank, self._ranks = memory.rank, len(memory.addresses)
        self._dim, self._dtype = dim, dtype
        self._addresses = memory.addresses
        self._peer_table = self._make_peer_table(_POLLS_MAX)
        outputs = ["added", "normalized"]
        names = ["change", "input", "weight", "constants", "peer_table"]
        self._sum_norm = make_kernel("cuda", "peers/sum_norm", names, outputs, header=HEADER)
        results = ["product", "weights", "shared", "gate"]
        self._sum_experts_norm = make_kernel(
            "cuda", "peers/sum_experts_norm", [*results, *names[1:]], outputs, header=HEADER
        )

    def takes(self, hidden: mx.array) -> bool:
        """Tell whether rows [rows, dim] have the memory's dim and dtype, and are few enough."""
        rows, dim = hidden.shape
        return bool(rows <= SUMMED_ROWS_MAX and dim == self._dim and hidden.dtype == self._dtype)

    def add_norm(
        self, hidden: mx.array, change: mx.array, weight: mx.array, epsilon: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Sum a layer's output over ranks, add it to its input, and normalize the result.

        Args:
            hidden: [rows, dim], equal on all ranks.
            change: this rank's summand of the output, like `hidden`.
            weight: [dim], of the norm.
            epsilon: `device_numbers`, of the norm.

        Returns:
            (sum, normalized sum), both like `hidden`, to the bit the same on all ranks.
        """
        inputs = [change, hidden, weight, epsilon, self._peer_table]
        return start_norm(self._sum_norm, inputs, self._template(hidden), hidden)

    def add_experts_norm(
        self, hidden: mx.array, results: ExpertResults, weight: mx.array, epsilon: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Add up the results of each token's experts, and go on as `add_norm`.

        Args:
            hidden: [tokens, dim], equal on all ranks, in the dtype of the results.
            results: of this rank's experts, or of its share of each expert.
            weight: as for `add_norm`.
            epsilon: as for `add_norm`.
        """
        inputs = [*sum_inputs(results), hidden, weight, epsilon, self._peer_table]
        template = [*sum_template(results), *self._of_ranks()]
        return start_norm(self._sum_experts_norm, inputs, template, hidden)

    def find_compiler_fault(self) -> str:
        """Return why the kernels do not run, or "".

        They are started with addresses of 0, so that they return at once.
        """
        table, self._peer_table = self._peer_table, mx.zeros_like(self._peer_table)
        try:
            return first_error(self._sum_once, [mx.ones((1, self._dim), dtype=self._dtype)])
        finally:
            self._peer_table = table

    def _sum_once(self, hidden: mx.array) -> None:
        results, epsilon = ExpertResults(hidden[None], mx.ones((1, 1)), None, None), mx.zeros((1,))
        mx.eval(self.add_norm(hidden, hidden, hidden[0], epsilon))
        mx.eval(self.add_experts_norm(hidden, results, hidden[0], epsilon))

    def find_difference(self, all_agree: Callable[[bool], bool]) -> str:
        """Sum numbers that all ranks know; return the fault, or "". A collective.

        Polls are limited: where a GPU's stores do not reach another one's memory, ranks would wait
        forever.
        """
        weight, epsilon = mx.ones((self._dim,), dtype=self._dtype), mx.zeros((1,))
        tries = [self._summands(number, rows) for number, rows in enumerate(_TRIED_ROWS)]
        totals = [mx.stack(summands).astype(mx.float32).sum(axis=0) for summands in tries]
        mx.eval(tries, totals)
        # A trial polls for a few seconds only, so all ranks begin it together.
        all_agree(True)
        table, self._peer_table = self._peer_table, self._make_peer_table(TRIED_POLLS)
        fault = ""
        # To the end, also after a difference: the other ranks wait for this one's summands.
        for summands, total in zip(tries, totals, strict=True):
            own, nothing = summands[self._rank], mx.zeros_like(summands[0])
            added = self.add_norm(nothing, own, weight, epsilon)[0].astype(mx.float32)
            if not mx.allclose(added, total, _TOLERANCE, _TOLERANCE).item():
                fault = f"a trial sum of {len(own)} rows is wrong"
        self._peer_table = table
        return fault

    def _summands(self, number: int, rows: int) -> list[mx.array]:
        """Return what each rank adds in a trial, [rows, dim]."""
        keys = [mx.random.key(number * self._ranks + rank) for rank in range(self._ranks)]
        shape = rows, self._dim
        return [mx.random.normal(shape, key=key).astype(self._dtype) for key in keys]

    def _make_peer_table(self, polls: int) -> mx.array:
        """Return what kernels are given, uint64 [ranks + 1].

        The address of each rank's memory, then the most polls for a summand.
        """
        table = mx.array(np.array([*self._addresses, polls], dtype=np.uint64))
        mx.eval(table)
        return table

    def _template(self, hidden: mx.array) -> list[tuple[str, Any]]:
        dim = hidden.shape[-1]
        vector = vector_size(dim, hidden.dtype)
        return [("T", hidden.dtype), ("DIM", dim), ("VECTOR_SIZE", vector), *self._of_ranks()]

    def _of_ranks(self) -> list[tuple[str, Any]]:
        return [("RANK", self._rank), ("RANKS", self._ranks), ("ROWS_MAX", SUMMED_ROWS_MAX)]
