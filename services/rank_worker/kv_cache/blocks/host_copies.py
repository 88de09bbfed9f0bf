"""Copies of CUDA arrays in page-locked host memory: what is read there moves nothing.

When the host looks into an array of MLX's CUDA backend, MLX first moves all of it into managed
memory, waits for that, and keeps such memory for later arrays: from then on what the device
computes with comes back by page faults. So blocks on their way to files are written by a kernel
straight into memory of CUDA's that the host owns. The kernel runs on a stream of its own, beside
the steps.
"""

import contextlib
import ctypes
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import mlx.core as mx

from services.rank_worker.device.hardware import device_kind
from shared.log import Log

_log = Log("rank_worker.blocks")

DRIVER = "libcuda.so.1"
"""CUDA's driver: MLX brings its runtime inside itself, where nobody else can call it."""

_PORTABLE = 1
"""CU_MEMHOSTALLOC_PORTABLE: for all contexts of this process."""

_THREADS = 256
_GRID = 64 * _THREADS
"""As much as saturates PCIe; the rest of the device computes meanwhile."""

_SIZE_MIN = 64 * 1024
"""No part is smaller."""

UNUSED_BYTES_MAX = 1024**3
"""More memory than this is not left unused: what waits is bounded by `cache.spill_bytes_max`, but
it may be of other lengths each time."""

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


class PageLocked(Protocol):
    """Where memory comes from that the device writes to and the host owns."""

    def allocate(self, size_bytes: int) -> int:
        """Return the address of so many bytes. Raises OSError when there are none."""

    def release(self, address: int) -> None:
        """Give memory back that nothing reads or writes any more."""


class HostBuffers:
    """Page-locked memory, taken once and used again and again. For MLX's thread."""

    def __init__(self, source: PageLocked) -> None:
        self._source = source
        self._returned: deque[tuple[int, int]] = deque()
        """(size, address) of what nobody refers to any more, noted by whatever thread was last."""
        self._unused: dict[int, list[int]] = {}
        """Addresses by the size of what is there."""
        self._unused_bytes = 0

    def take(self, size_bytes: int) -> memoryview:
        """Return writable bytes, free again when nobody refers to them any more.

        Raises:
            OSError: there is no memory.
        """
        self._note_returned()
        held = _rounded(size_bytes)
        unused = self._unused.get(held)
        if unused:
            address = unused.pop()
            self._unused_bytes -= held
        else:
            if self._unused_bytes > UNUSED_BYTES_MAX:
                self._release_unused()
            address = self._source.allocate(held)
        part = (ctypes.c_ubyte * size_bytes).from_address(address)
        # The memoryview refers to the part, and so does each view of that view.
        weakref.finalize(part, self._returned.append, (held, address)).atexit = False
        return memoryview(part).cast("B")

    def reserve(self, size_bytes: int, count: int) -> None:
        """Take memory for so many parts of one size ahead of time.

        Raises:
            OSError: there is not so much; what there is stays.
        """
        parts = [self.take(size_bytes) for _ in range(count)]
        parts.clear()

    def _note_returned(self) -> None:
        while self._returned:
            held, address = self._returned.popleft()
            self._unused.setdefault(held, []).append(address)
            self._unused_bytes += held

    def _release_unused(self) -> None:
        for addresses in self._unused.values():
            for address in addresses:
                self._source.release(address)
        self._unused.clear()
        self._unused_bytes = 0


def _rounded(size_bytes: int) -> int:
    """Return a size that blocks of about this length share: four to each doubling."""
    step = max(_SIZE_MIN, 1 << max(0, size_bytes.bit_length() - 3))
    return -(-size_bytes // step) * step


class HostCopies:
    """Starts copies. For MLX's thread."""

    def __init__(self, memory: HostBuffers) -> None:
        self._memory = memory
        self._stream = mx.new_stream(mx.gpu)
        self._kernel: Any = mx.fast.cuda_kernel(
            name="lockstep_to_host",
            input_names=["source", "about"],
            output_names=["done"],
            source=_SOURCE,
        )

    def reserve(self, size_bytes: int, total_bytes: int) -> None:
        """Take memory for payloads of one size now, up to `UNUSED_BYTES_MAX`: 0.6 ms per MB.

        Where there is less, the rest is sought when it is needed.
        """
        count = min(total_bytes, UNUSED_BYTES_MAX) // size_bytes
        try:
            self._memory.reserve(size_bytes, count)
        except OSError as error:
            _log.warning("host_memory_short", wanted_bytes=size_bytes * count, cause=str(error))

    def start(self, payload: mx.array) -> tuple[memoryview, mx.array]:
        """Return where the bytes of `payload`, uint8 [bytes], will be, and what says when.

        They are there when the second, uint8 [1], is computed, which is the caller's to start.

        Raises:
            OSError: there is no memory.
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


def open_copies() -> HostCopies | None:
    """Return copies that have been tried out; None where there is no CUDA, or they do not work."""
    if device_kind() != "cuda":
        return None
    try:
        copies = HostCopies(HostBuffers(_Driver()))
        _try_out(copies)
    except Exception as error:  # noqa: BLE001 - kernels are compiled here, by tools of the machine
        _log.warning("host_copies_off", cause=str(error)[:500])
        return None
    return copies


def _try_out(copies: HostCopies) -> None:
    payload = mx.arange(100_003, dtype=mx.int32).astype(mx.uint8)
    view, done = copies.start(payload)
    mx.eval(done)
    expected = bytes(number % 256 for number in range(100_003))
    if bytes(view) != expected:
        raise OSError("a copy of an array has other bytes than the array")


class _Driver:
    """Page-locked memory of the context that MLX computes in."""

    def __init__(self) -> None:
        """Load CUDA's driver.

        Raises:
            OSError: there is none, or it refuses.
        """
        self._calls = ctypes.CDLL(DRIVER)
        self._context = ctypes.c_void_p()
        self._check("cuInit", self._calls.cuInit(0))
        # MLX's runtime uses the first visible device's primary context; this is a reference to it.
        retained = self._calls.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0)
        self._check("cuDevicePrimaryCtxRetain", retained)

    def allocate(self, size_bytes: int) -> int:
        address = ctypes.c_void_p()
        with self._current_context():
            code = self._calls.cuMemHostAlloc(
                ctypes.byref(address), ctypes.c_size_t(size_bytes), ctypes.c_uint(_PORTABLE)
            )
        self._check(f"cuMemHostAlloc of {size_bytes} bytes", code)
        assert address.value is not None
        return address.value

    def release(self, address: int) -> None:
        with self._current_context():
            code = self._calls.cuMemFreeHost(ctypes.c_void_p(address))
        self._check("cuMemFreeHost", code)

    @contextlib.contextmanager
    def _current_context(self) -> Iterator[None]:
        self._check("cuCtxPushCurrent", self._calls.cuCtxPushCurrent_v2(self._context))
        try:
            yield
        finally:
            self._calls.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    @staticmethod
    def _check(call: str, code: int) -> None:
        if code:
            raise OSError(f"{call} failed with CUDA's code {code}")
