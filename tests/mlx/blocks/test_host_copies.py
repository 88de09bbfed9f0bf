"""Page-locked host memory into which spilled blocks are copied on CUDA."""

import ctypes
import gc

import mlx.core as mx
import pytest

from services.rank_worker.device.hardware import device_kind
from services.rank_worker.kv_cache.blocks.host_copier import (
    HostBuffers,
    HostCopier,
    open_host_copier,
)

STEP = 64 * 1024


class _RecordingHeap:
    """Ordinary memory that records the sizes taken from it."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.parts: dict[int, ctypes.Array[ctypes.c_ubyte]] = {}

    def allocate_page_locked(self, size_bytes: int) -> int:
        part = (ctypes.c_ubyte * size_bytes)()
        address = ctypes.addressof(part)
        self.parts[address] = part
        self.taken.append(size_bytes)
        return address

    def free_page_locked(self, address: int) -> None:
        del self.parts[address]


class _FullHeap(_RecordingHeap):
    def allocate_page_locked(self, size_bytes: int) -> int:
        raise OSError(f"no {size_bytes} bytes")


def test_host_buffer_is_reused_only_after_its_last_view_ends() -> None:
    """A buffer is reused only after the last view of its bytes is gone."""
    heap = _RecordingHeap()
    memory = HostBuffers(heap)
    first = memory.take(100)
    first[:] = b"x" * 100
    part = first.toreadonly()[10:20]
    del first
    gc.collect()

    other = memory.take(90)
    other[:] = b"y" * 90
    assert bytes(part) == b"x" * 10
    assert heap.taken == [STEP, STEP]

    del part, other
    gc.collect()
    again = [memory.take(STEP), memory.take(1)]
    assert heap.taken == [STEP, STEP]
    assert [len(view) for view in again] == [STEP, 1]


def test_reserved_host_buffers_hold_reserved_number_of_blocks_without_new_allocation() -> None:
    """Reserved buffers hold the reserved number of blocks; one more block allocates memory."""
    heap = _RecordingHeap()
    memory = HostBuffers(heap)
    memory.reserve(5 * STEP, 3)
    gc.collect()
    assert heap.taken == [5 * STEP] * 3

    views = [memory.take(5 * STEP) for _ in range(4)]
    assert heap.taken == [5 * STEP] * 4
    assert len(views) == 4


def test_refused_host_memory_allocation_raises_os_error() -> None:
    """A refused allocation raises OSError."""

    with pytest.raises(OSError, match=f"no {2 * STEP} bytes"):
        HostBuffers(_FullHeap()).take(STEP + 1)


def test_unused_host_buffers_beyond_limit_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused buffers of other lengths are freed beyond the limit; buffers in use stay valid."""
    monkeypatch.setattr(
        "services.rank_worker.kv_cache.blocks.host_copier.UNUSED_BYTES_MAX", 100 * STEP
    )
    heap = _RecordingHeap()
    memory = HostBuffers(heap)
    held = memory.take(7)
    for size in range(STEP, 200 * STEP, STEP // 2):
        view = memory.take(size)
        view[size - 1] = 1
        del view
    gc.collect()

    assert sum(ctypes.sizeof(part) for part in heap.parts.values()) < 450 * STEP
    assert sum(heap.taken) < 60 * sum(range(8)) * STEP
    held[:] = b"x" * 7


def test_host_copy_of_cuda_array_has_equal_bytes() -> None:
    """On CUDA a copy of any length and offset has the bytes of the array; other devices copy
    nothing.
    """
    copies = open_host_copier()
    if device_kind() != "cuda":
        assert copies is None
        return
    assert copies is not None
    for size in (1, 15, 16, 17, STEP, 3_000_001):
        payload = (mx.arange(size, dtype=mx.int32) * 7 % 251).astype(mx.uint8)
        for first in (0, size // 3):
            view, done = copies.start(payload[first:])
            mx.eval(done)
            assert bytes(view) == bytes(number * 7 % 251 for number in range(first, size))


def test_opening_host_copier_returns_none_when_kernel_compilation_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the headers of CUDA no host copier is opened, and no error is raised."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)

    def fail(*_: object) -> None:
        raise RuntimeError("nvrtc: no such file")

    monkeypatch.setattr(HostCopier, "__init__", fail)
    assert open_host_copier() is None
