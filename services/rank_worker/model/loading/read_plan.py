"""Which reads of the weight files fill an array: few, bounded in size, with small gaps. No MLX."""

from collections.abc import Iterator
from typing import NamedTuple

from services.rank_worker.model.loading.tensor_slices import Shape, SlicedArray, row_major_strides

BLOCK_BYTES = 1024 * 1024
"""Upper limit for one read, so that several threads can share one weight."""

GAP_BYTES = 16 * 1024
"""Unwanted bytes up to this many are read together with their neighbours. Measured with 4 threads
on an NVMe disk, cold and cached: separate reads are slower below this size and faster above."""

Axis = tuple[int, int, int]
"""(number of runs, bytes between them in the file, bytes between them in memory)."""


class FileRead(NamedTuple):
    """One read of a weight file: bytes of a stored tensor, and their places in an array."""

    tensor: int
    """Index of the stored tensor."""
    offset: int
    """Offset of the first byte in the tensor."""
    target: int
    """Offset of the first byte in the array's memory."""
    axes: tuple[Axis, ...]
    """How the run of bytes repeats, outermost in the file first; empty: one run."""
    run_bytes: int
    """Length of a run, which is contiguous in the file and in memory."""

    @property
    def span_bytes(self) -> int:
        """Bytes in the file from the first to the last one needed, gaps between runs included."""
        return _span(self.axes, self.run_bytes)


def plan_reads(array: SlicedArray) -> Iterator[FileRead]:
    """Yield the reads of weight files that together fill an array's memory.

    Args:
        array: the array; its memory is row-major and contiguous.
    """
    memory = row_major_strides(array.shape, array.item_bytes)
    for part in array.slices:
        target = sum(a * b for a, b in zip(part.start, memory, strict=True))
        axes, run = _merge_axes(part.shape, part.strides, memory, array.item_bytes)
        yield from _divide(FileRead(part.tensor, part.offset, target, axes, run))


def _merge_axes(shape: Shape, file: Shape, memory: Shape, run: int) -> tuple[tuple[Axis, ...], int]:
    """Return the fewest axes in the file's order, and the longest contiguous run in bytes.

    Args:
        shape: number of items by axis.
        file: strides in the file, in bytes.
        memory: strides in memory, in bytes.
        run: bytes of one item.
    """
    axes = [axis for axis in zip(shape, file, memory, strict=True) if axis[0] > 1]
    # Broadcast axes (file stride 0) come first: their bytes are read again for each repetition.
    axes.sort(key=lambda axis: (axis[1] != 0, -axis[1]))
    kept: list[Axis] = []
    for count, file_stride, memory_stride in reversed(axes):
        inner = kept[-1] if kept else (0, 0, 0)
        if not kept and file_stride == memory_stride == run:
            run *= count
        elif kept and (file_stride, memory_stride) == (inner[0] * inner[1], inner[0] * inner[2]):
            kept[-1] = (count * inner[0], *inner[1:])
        else:
            kept.append((count, file_stride, memory_stride))
    return tuple(reversed(kept)), run


def _divide(whole: FileRead) -> Iterator[FileRead]:
    """Yield a read in parts of at most one block, divided where gaps are large."""
    if not whole.axes:
        for at in range(0, whole.run_bytes, BLOCK_BYTES):
            yield whole._replace(
                offset=whole.offset + at,
                target=whole.target + at,
                run_bytes=min(BLOCK_BYTES, whole.run_bytes - at),
            )
        return
    (count, file_stride, memory_stride), inner = whole.axes[0], whole.axes[1:]
    inner_span = _span(inner, whole.run_bytes)
    runs_per_read = 1
    if file_stride and inner_span <= BLOCK_BYTES and _is_dense(whole.axes, whole.run_bytes):
        runs_per_read = min(count, 1 + (BLOCK_BYTES - inner_span) // file_stride)
    for first in range(0, count, runs_per_read):
        part = whole._replace(
            offset=whole.offset + first * file_stride,
            target=whole.target + first * memory_stride,
        )
        if runs_per_read == 1:
            yield from _divide(part._replace(axes=inner))
        else:
            outer = (min(runs_per_read, count - first), file_stride, memory_stride)
            yield part._replace(axes=(outer, *inner))


def _span(axes: tuple[Axis, ...], run: int) -> int:
    return run + sum((count - 1) * file_stride for count, file_stride, _ in axes)


def _is_dense(axes: tuple[Axis, ...], run: int) -> bool:
    """Tell whether all gaps are small enough to be read with their neighbours."""
    span = run
    for count, file_stride, _ in reversed(axes):
        if file_stride - span > GAP_BYTES:
            return False
        span += (count - 1) * file_stride
    return True
