"""Makes kernels of one source text for two kinds of GPU. Owns their dialects: CUDA and Metal.

A kernel is the body of a function. It uses the names defined here for what the languages call
differently. MLX writes the function's head: inputs, outputs and the template's constants.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from services.rank_worker.device.cuda.kept_kernels.kept_kernel import kept_cuda_kernel

Gpu = Literal["cuda", "metal"]

_FOLDER = Path(__file__).parent / "sources"
VECTOR_BYTES = 16
"""Bytes that a thread reads at once."""
_ROW_THREADS_MAX = 512
"""Most threads of a group that normalizes a row."""
_NUMBERS_MIN = 4
"""Numbers that an array has at least, so that MLX keeps it in the memory of the GPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dialect:
    """How one language says what kernels need."""

    header: str
    """Definitions before the kernel's function."""
    prologue: str
    """First lines of its body: group_id, group_count and thread_id."""


CUDA = Dialect(
    """
#define DEVICE
#define SHARED __shared__
#define UNROLL _Pragma("unroll")
#define GROUP_BARRIER __syncthreads()
#define WARP_BARRIER __syncwarp()
#define SHUFFLE_XOR(value, mask) __shfl_xor_sync(0xffffffffu, value, mask)
#define WARP_SUM(value) lockstep_warp_sum(value)
#define WARP_MAX(number) __reduce_max_sync(0xffffffffu, number)
#define WARP_MIN(number) __reduce_min_sync(0xffffffffu, number)
#define FLOAT_BITS(number) __float_as_int(number)
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define MAX(one, other) fmaxf(one, other)
#define EXP2(value) lockstep_exp2(value)
#define EXP(value) expf(value)
#define ROUND(value) roundf(value)
#define RSQRT(value) (1.0f / sqrtf(value))
static __device__ __forceinline__ float lockstep_exp2(float value) {
  float power;  // 0 where it is too small for a normal number
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}
static __device__ __forceinline__ float lockstep_warp_sum(float value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, mask);
  }
  return value;
}
""",
    """
const uint3 group_id = blockIdx;
const dim3 group_count = gridDim;
const int thread_id = threadIdx.x;
""",
)

METAL = Dialect(
    """
#define DEVICE device
#define SHARED threadgroup
#define UNROLL _Pragma("clang loop unroll(full)")
#define GROUP_BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define WARP_BARRIER simdgroup_barrier(mem_flags::mem_threadgroup)
#define SHUFFLE_XOR(value, mask) simd_shuffle_xor(value, ushort(mask))
#define WARP_SUM(value) lockstep_warp_sum(value)
#define WARP_MAX(number) simd_max(number)
#define WARP_MIN(number) simd_min(number)
#define FLOAT_BITS(number) as_type<int>(number)
#define NEGATIVE_INFINITY (-INFINITY)
#define MAX(one, other) metal::max(one, other)
#define EXP2(value) metal::exp2(value)
#define EXP(value) metal::exp(value)
#define ROUND(value) metal::round(value)
#define RSQRT(value) metal::precise::rsqrt(value)
static inline float lockstep_warp_sum(float value) {
  for (ushort mask = 16; mask > 0; mask /= 2) {
    value += simd_shuffle_xor(value, mask);
  }
  return value;
}
""",
    """
const uint3 group_id = threadgroup_position_in_grid;
const uint3 group_count = threadgroups_per_grid;
const int thread_id = thread_position_in_threadgroup.x;
""",
)


def make_kernel(
    device: Gpu,
    path: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    header: str | None = None,
    start: str = "",
    suffix: str = "",
    in_place: bool = False,
) -> Any:
    """Return a kernel for a kind of GPU; nothing is compiled yet.

    Args:
        device: the kind.
        path: of the kernel's text, see `read_source`.
        inputs: names of the arrays that it reads.
        outputs: names of those that it writes.
        header: definitions before its function; None: those of the dialect.
        start: text before that of the file.
        suffix: of its name, where kernels of different `start` have one file.
        in_place: it writes to its inputs too, so MLX must not give it copies of those with gaps.

    Returns:
        The kernel, which is started as one of `mx.fast.metal_kernel`.
    """
    dialect = CUDA if device == "cuda" else METAL
    make: Any = kept_cuda_kernel if device == "cuda" else mx.fast.metal_kernel
    return make(
        name=f"lockstep_{path.rpartition('/')[2]}{suffix}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=dialect.prologue + start + read_source(path),
        header=dialect.header if header is None else header,
        ensure_row_contiguous=not in_place,
    )


def read_source(name: str) -> str:
    """Return the source text of a kernel without its comments, which cost time at each launch.

    MLX hashes the source each time that a kernel is started.

    Args:
        name: of a file in `sources`, such as `add_norm`. A line `#include "one.kernel"` in it
            stands for the text of that file.
    """
    lines = (_FOLDER / f"{name}.kernel").read_text().splitlines()
    code = (line.partition("//")[0].strip() for line in lines)
    return "".join(map(_included, filter(None, code)))


def _included(line: str) -> str:
    if not line.startswith("#include"):
        return line + "\n"
    return read_source(line.split('"')[1].removesuffix(".kernel"))


def vector_size(count: int, dtype: mx.Dtype) -> int:
    """Return how many numbers a thread reads at once: a divisor of `count`.

    Args:
        count: numbers side by side.
        dtype: of the numbers.
    """
    size = VECTOR_BYTES // dtype.size
    while count % size:
        size //= 2
    return size


def norm_threads(dim: int, dtype: mx.Dtype) -> int:
    """Return the threads of a group that normalizes a row; each reads a vector at a time.

    Args:
        dim: numbers of the row.
        dtype: of the numbers.
    """
    return min(-(-dim // (vector_size(dim, dtype) * 32)) * 32, _ROW_THREADS_MAX)


def device_numbers(*numbers: float) -> mx.array:
    """Return numbers that kernels read in every step, in the memory of the GPU.

    On CUDA MLX keeps arrays of up to 8 bytes, and those made of Python's numbers, where the host
    can read them too. Each group of threads fetches them from there: of 128 rows a norm took 17
    microseconds, and takes 2 without.

    Returns:
        float32, the numbers and then zeros, 4 in all or more; computed.
    """
    host = mx.array([*numbers, *[0.0] * (_NUMBERS_MIN - len(numbers))], dtype=mx.float32)
    # While `host` exists, MLX does not reuse its memory for the result.
    copied = host + 0.0
    mx.eval(copied)
    return copied


def start_norm(
    kernel: Any, inputs: Sequence[mx.array], template: Sequence[tuple[str, Any]], hidden: mx.array
) -> tuple[mx.array, mx.array]:
    """Start a kernel that adds something to rows and normalizes the sum.

    Args:
        kernel: one whose text includes `norms/normalized_sum`.
        inputs: of the kernel.
        template: of the kernel, without the number of threads.
        hidden: the rows, [..., dim].

    Returns:
        (sum, normalized sum), both like `hidden`.
    """
    dim = hidden.shape[-1]
    threads = norm_threads(dim, hidden.dtype)
    added, normalized = kernel(
        inputs=list(inputs),
        template=[*template, ("THREADS", threads)],
        grid=(threads, hidden.size // dim, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[hidden.shape, hidden.shape],
        output_dtypes=[hidden.dtype, hidden.dtype],
    )
    return added, normalized


def largest_divisor(heads: int, most: int) -> int:
    """Return how many of some heads share a group of threads: a divisor of them.

    Args:
        heads: that have the same keys.
        most: largest result.
    """
    return max(one for one in range(1, most + 1) if heads % one == 0)
