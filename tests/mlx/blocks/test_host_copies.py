"""Page-locked memory that spilled blocks are copied to on CUDA, and who may use it when."""

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


class _Heap:
    """Ordinary memory, and how much of it was taken."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.parts: dict[int, ctypes.Array[ctypes.c_ubyte]] = {}

    def allocate(self, size_bytes: int) -> int:
        part = (ctypes.c_ubyte * size_bytes)()
        address = ctypes.addressof(part)
        self.parts[address] = part
        self.taken.append(size_bytes)
        return address

    def release(self, address: int) -> None:
        del self.parts[address]


class _Refusing(_Heap):
    def allocate(self, size_bytes: int) -> int:
        raise OSError(f"no {size_bytes} bytes")


def test_memory_is_used_again_only_when_nobody_looks_at_it() -> None:
    """A view of a view keeps its bytes; when the last is gone the next gets the same place."""
    heap = _Heap()
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


def test_memory_is_reserved_for_what_may_be_under_way() -> None:
    """So many blocks at once take nothing more; one more does."""
    heap = _Heap()
    memory = HostBuffers(heap)
    memory.reserve(5 * STEP, 3)
    gc.collect()
    assert heap.taken == [5 * STEP] * 3

    views = [memory.take(5 * STEP) for _ in range(4)]
    assert heap.taken == [5 * STEP] * 4
    assert len(views) == 4


def test_no_memory_is_said() -> None:
    """What the system refuses is an OSError, and what was there before stays usable."""

    with pytest.raises(OSError, match=f"no {2 * STEP} bytes"):
        HostBuffers(_Refusing()).take(STEP + 1)


def test_unused_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of ever new lengths do not hold the memory of all lengths that there ever were."""
    monkeypatch.setattr(
        "services.rank_worker.kv_cache.blocks.host_copier.UNUSED_BYTES_MAX", 100 * STEP
    )
    heap = _Heap()
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


def test_copies_have_the_bytes_of_the_arrays() -> None:
    """With CUDA: every length, wherever it begins. CPUs and Metal read arrays where they are."""
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


def test_what_cannot_be_compiled_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without CUDA's headers serves on, and copies as MLX does."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)

    def fail(*_: object) -> None:
        raise RuntimeError("nvrtc: no such file")

    monkeypatch.setattr(HostCopier, "__init__", fail)
    assert open_host_copier() is None
