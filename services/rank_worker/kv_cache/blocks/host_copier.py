"""Copies CUDA arrays into page-locked host memory, where reading them moves no device memory.

When the host reads an array of MLX's CUDA backend, MLX moves it into managed memory, waits for that
and reuses such memory for later arrays, which then cause page faults on the device. So a kernel on
a stream of its own copies spilled blocks directly into page-locked memory, parallel to the steps.
"""

import ctypes
import weakref
from typing import Protocol

import mlx.core as mx

from services.rank_worker.device.cuda.driver import Driver
from services.rank_worker.device.cuda.kept_kernels.kept_kernel import kept_cuda_kernel
from services.rank_worker.device.hardware import device_kind
from shared.log import Log

_log = Log("rank_worker.blocks")

_THREADS = 256
_GRID = 64 * _THREADS
"""Enough threads to saturate PCIe, leaving the rest of the device to the steps."""

_SIZE_MIN = 64 * 1024
"""Smallest allocation in bytes."""

UNUSED_BYTES_MAX = 1024**3
"""Limit for unused memory that is kept for reuse. Memory in use is bounded by
`cache.spill_bytes_max`, but the sizes of allocations vary."""

_SOURCE = """
  const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  const long long stride = gridDim.x * (long long)blockDim.x;
  unsigned char* target = reinterpret_cast<unsigned char*>(about[0]);
  const long long size = about[1];
  const bool is_aligned = reinterpret_cast<unsigned long long>(source) % 16 == 0;
  const long long wide = is_aligned ? size / 16 : 0;
  const uint4* from = reinterpret_cast<const uint4*>(source);
  uint4* to = reinterpret_cast<uint4*>(target);
  for (long long i = first; i < wide; i += stride) to[i] = from[i];
  for (long long i = wide * 16 + first; i < size; i += stride) target[i] = source[i];
  __threadfence_system();
  if (first == 0) done[0] = 1;
"""


class PageLockedAllocator(Protocol):
    """Allocates host memory that the device can write to."""

    def allocate_page_locked(self, size_bytes: int) -> int:
        """Return the address of new memory. Raises OSError when memory is short."""

    def free_page_locked(self, address: int) -> None:
        """Free memory that is no longer used."""


class HostBuffers:
    """A pool of page-locked host memory, reused by size. To be used by MLX's thread only."""

    def __init__(self, allocator: PageLockedAllocator) -> None:
        self._allocator = allocator
        self._unused: dict[int, list[int]] = {}
        """Addresses of unused buffers by size. Any thread may append one to a list."""

    def take(self, size_bytes: int) -> memoryview:
        """Return a writable buffer from the pool, or a new one if none of this size is unused.

        The buffer returns to the pool when the last reference to it is dropped.

        Args:
            size_bytes: length of the buffer.

        Raises:
            OSError: when there is no memory.
        """
        allocated = _rounded(size_bytes)
        unused = self._unused.setdefault(allocated, [])
        if not unused:
            self._limit_unused()
        address = unused.pop() if unused else self._allocator.allocate_page_locked(allocated)
        buffer = (ctypes.c_ubyte * size_bytes).from_address(address)
        # The memoryview refers to `buffer`, and so does every view of it.
        weakref.finalize(buffer, unused.append, address).atexit = False
        return memoryview(buffer).cast("B")

    def reserve(self, size_bytes: int, count: int) -> None:
        """Allocate buffers of one size ahead of time and leave them in the pool.

        Args:
            size_bytes: length of each buffer.
            count: number of buffers.

        Raises:
            OSError: when there is less memory; buffers allocated until then are kept.
        """
        buffers = [self.take(size_bytes) for _ in range(count)]
        buffers.clear()

    def _limit_unused(self) -> None:
        if sum(size * len(unused) for size, unused in self._unused.items()) > UNUSED_BYTES_MAX:
            for unused in self._unused.values():
                while unused:
                    self._allocator.free_page_locked(unused.pop())


def _rounded(size_bytes: int) -> int:
    """Round a size up, so that similar sizes share buffers: four sizes per power of two."""
    step = max(_SIZE_MIN, 1 << max(0, size_bytes.bit_length() - 3))
    return -(-size_bytes // step) * step


class HostCopier:
    """Starts copies of device arrays to the host. To be used by MLX's thread only."""

    def __init__(self, memory: HostBuffers) -> None:
        self._memory = memory
        self._stream = mx.new_stream(mx.gpu)
        self._kernel = kept_cuda_kernel(
            name="lockstep_to_host",
            input_names=["source", "about"],
            output_names=["done"],
            source=_SOURCE,
        )

    def reserve(self, size_bytes: int, total_bytes: int) -> None:
        """Allocate memory for payloads ahead of time, which takes 0.6 ms per MB.

        When there is too little memory, the rest is allocated when it is needed.

        Args:
            size_bytes: size of one payload.
            total_bytes: size of all payloads; limited to `UNUSED_BYTES_MAX`.
        """
        count = min(total_bytes, UNUSED_BYTES_MAX) // size_bytes
        try:
            self._memory.reserve(size_bytes, count)
        except OSError as error:
            _log.warning("host_memory_short", wanted_bytes=size_bytes * count, cause=str(error))

    def start(self, payload: mx.array) -> tuple[memoryview, mx.array]:
        """Build a copy of a device array into host memory; evaluating the result runs it.

        Args:
            payload: the array, uint8 [bytes].

        Returns:
            (host buffer, uint8 [1]). The buffer is complete when the second array is computed,
            which the caller must start.

        Raises:
            OSError: when there is no memory.
        """
        view = self._memory.take(payload.nbytes)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
        (done,) = self._kernel(
            inputs=[payload, mx.array([address, payload.nbytes], dtype=mx.int64)],
            output_shapes=[(1,)],
            output_dtypes=[mx.uint8],
            grid=(_GRID, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            stream=self._stream,
        )
        return view, done


def open_host_copier() -> HostCopier | None:
    """Return a copier that has passed a test copy; None without CUDA or when the copy fails."""
    if device_kind() != "cuda":
        return None
    try:
        copier = HostCopier(HostBuffers(Driver()))
        _test(copier)
    except Exception as error:  # noqa: BLE001 - compiles a kernel with tools of the machine
        _log.warning("host_copies_disabled", cause=str(error)[:500])
        return None
    return copier


def _test(copier: HostCopier) -> None:
    payload = mx.arange(100_003, dtype=mx.int32).astype(mx.uint8)
    view, done = copier.start(payload)
    mx.eval(done)
    expected = bytes(number % 256 for number in range(100_003))
    if bytes(view) != expected:
        raise OSError("the test copy differs from its array")
