"""What kernels need for CUDA's tensor cores. Owns the instructions and how their numbers lie.

An instruction multiplies a tile of 16 rows by 8 columns, 32 numbers of each. Thread `lane` of a
warp holds 8 numbers of rows lane / 4 (low) and lane / 4 + 8 (high) and of column lane / 4 (given).
It gets these rows' sums for columns lane % 4 * 2 and the next one. Which 8 of the 32 numbers a
thread holds does not matter as long as both sides agree, so it reads 8 that stand side by side.

`READ_TURNED` transposes 32 rows of 8 numbers in shared memory. Thread `lane` passes the address of
row `lane`, and gets number lane / 4 of rows 8 i + lane % 4 * 2 and the next one, i = 0 to 3.
"""

import mlx.core as mx

from services.rank_worker.model.fast_path.kernels.dialects import CUDA

DTYPES: tuple[mx.Dtype, ...] = (mx.bfloat16, mx.float16)
"""Types of the numbers that they multiply."""
OUTPUTS = 16
"""Outputs of a matrix that a group of threads computes in `plain_products`."""
TENSOR_TILE_ROWS = 8
"""Rows of a tile there."""
CHUNK = 32
"""Inputs of which a warp reads at a time there; they must divide those of a matrix."""

HEADER = (
    CUDA.header
    + """
#define EIGHT uint4
#define ZEROS make_uint4(0, 0, 0, 0)
#define NUMBER(eight, index) (reinterpret_cast<T*>(&(eight))[index])
#define ATOMIC_ADD(pointer, number) atomicAdd(pointer, number)
#define FENCE __threadfence()
#define READ_WRITTEN(pointer) __ldcg(pointer)
#define MIN(one, other) ((one) < (other) ? (one) : (other))
#define READ(pointer) __ldg(reinterpret_cast<const uint4*>(pointer))
#define READ_ONCE(pointer) lockstep_read_once(pointer)
#define COPY_EIGHT(to, from) lockstep_copy_eight(to, from)
#define READ_TURNED(pointer) lockstep_read_turned(pointer)
#define WRITE_TWO(pointer, one, other) lockstep_write_two(pointer, one, other)
#define WAIT_FOR_COPIES asm volatile("cp.async.wait_all;" ::: "memory")
#define MULTIPLY_TILES(totals, low, high, given) lockstep_multiply(totals, low, high, given, T())
#define MULTIPLY_LOW(totals, low, given) lockstep_multiply_low(totals, low, given, T())
static __device__ __forceinline__ uint4 lockstep_read_once(const void* pointer) {
  uint4 read;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(read.x), "=r"(read.y), "=r"(read.z), "=r"(read.w) : "l"(pointer));
  return read;
}
static __device__ __forceinline__ uint4 lockstep_read_turned(const uint4* pointer) {
  uint4 read;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(read.x), "=r"(read.y), "=r"(read.z), "=r"(read.w)
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(pointer))));
  return read;
}
static __device__ __forceinline__ void lockstep_copy_eight(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
      :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
static __device__ __forceinline__ void lockstep_write_two(
    __nv_bfloat16* pointer, float one, float other) {
  *reinterpret_cast<__nv_bfloat162*>(pointer) = __floats2bfloat162_rn(one, other);
}
static __device__ __forceinline__ void lockstep_write_two(__half* pointer, float one, float other) {
  *reinterpret_cast<__half2*>(pointer) = __floats2half2_rn(one, other);
}
#define LOCKSTEP_MULTIPLY(type, name)                                                            \\
  static __device__ __forceinline__ void lockstep_multiply_half(                                 \\
      float* totals, unsigned low_one, unsigned high_one, unsigned low_two, unsigned high_two,   \\
      unsigned one, unsigned two, type) {                                                        \\
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 "                  \\
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                  \\
        : "+f"(totals[0]), "+f"(totals[1]), "+f"(totals[2]), "+f"(totals[3])                     \\
        : "r"(low_one), "r"(high_one), "r"(low_two), "r"(high_two), "r"(one), "r"(two));         \\
  }
LOCKSTEP_MULTIPLY(__nv_bfloat16, "bf16")
LOCKSTEP_MULTIPLY(__half, "f16")
template <typename Type>
static __device__ __forceinline__ void lockstep_multiply(
    float* totals, uint4 low, uint4 high, uint4 given, Type) {
  lockstep_multiply_half(totals, low.x, high.x, low.y, high.y, given.x, given.y, Type());
  lockstep_multiply_half(totals, low.z, high.z, low.w, high.w, given.z, given.w, Type());
}
template <typename Type>
static __device__ __forceinline__ void lockstep_multiply_low(
    float* totals, uint4 low, uint4 given, Type) {
  float all[4] = {totals[0], totals[1], 0.0f, 0.0f};
  lockstep_multiply(all, low, make_uint4(0, 0, 0, 0), given, Type());
  totals[0] = all[0];
  totals[1] = all[1];
}
"""
)
"""Definitions before a kernel's function."""


def can_multiply(weight: mx.array) -> bool:
    """Tell whether `plain_products` multiplies with a matrix, or with one matrix per expert.

    Args:
        weight: [..., outputs, inputs].
    """
    return multiplies(weight.dtype) and weight.shape[-1] % CHUNK == 0


def multiplies(dtype: mx.Dtype) -> bool:
    """Tell whether tensor cores multiply numbers of a type."""
    return dtype in DTYPES
