"""From pieces of tensors to reads of files: few, of bounded size, little for nothing. No MLX."""

from collections.abc import Iterator
from typing import NamedTuple

from services.rank_worker.model.loading.strided import Shape, Strided, row_major

BLOCK_BYTES = 1024 * 1024
"""Most that one read takes, so that several threads share one weight."""

GAP_BYTES = 16 * 1024
"""Unwanted bytes up to this many are read along with those around them. Measured with 4 threads on
an NVMe disk, cold and cached: reads apart from each other are slower below and faster above."""

Axis = tuple[int, int, int]
"""How many, the distance in the file, the distance in memory; distances in bytes."""


class Read(NamedTuple):
    """Bytes that are read at once, and where they go."""

    source: int
    """Which tensor."""
    offset: int
    """Where they begin in it."""
    target: int
    """Where the first goes in the array's memory."""
    axes: tuple[Axis, ...]
    """How runs repeat, outermost in the file first; empty: once."""
    run_bytes: int
    """Bytes that lie together in the file and in memory."""

    @property
    def span_bytes(self) -> int:
        """Bytes from the first to the last, with what lies between."""
        return _span(self.axes, self.run_bytes)


def reads(array: Strided) -> Iterator[Read]:
    """Yield the reads that fill an array's memory, row-major without gaps."""
    memory = row_major(array.shape, array.item_bytes)
    for piece in array.pieces:
        target = sum(a * b for a, b in zip(piece.start, memory, strict=True))
        axes, run = _merged(piece.shape, piece.strides, memory, array.item_bytes)
        yield from _reads(Read(piece.source, piece.offset, target, axes, run))


def _merged(shape: Shape, file: Shape, memory: Shape, run: int) -> tuple[tuple[Axis, ...], int]:
    """Return axes in the file's order, as few as possible, and the longest run."""
    axes = [axis for axis in zip(shape, file, memory, strict=True) if axis[0] > 1]
    # What is repeated is read again: those axes come first.
    axes.sort(key=lambda axis: (axis[1] != 0, -axis[1]))
    kept: list[Axis] = []
    for count, apart, to in reversed(axes):
        if not kept and apart == to == run:
            run *= count
        elif kept and (apart, to) == (kept[-1][0] * kept[-1][1], kept[-1][0] * kept[-1][2]):
            kept[-1] = (count * kept[-1][0], *kept[-1][1:])
        else:
            kept.append((count, apart, to))
    return tuple(reversed(kept)), run


def _reads(whole: Read) -> Iterator[Read]:
    """Yield a read in blocks, and apart where the gaps are large."""
    if not whole.axes:
        for at in range(0, whole.run_bytes, BLOCK_BYTES):
            yield whole._replace(
                offset=whole.offset + at,
                target=whole.target + at,
                run_bytes=min(BLOCK_BYTES, whole.run_bytes - at),
            )
        return
    (count, apart, to), inner = whole.axes[0], whole.axes[1:]
    inner_span = _span(inner, whole.run_bytes)
    together = 1
    if apart and inner_span <= BLOCK_BYTES and _is_dense(whole.axes, whole.run_bytes):
        together = min(count, 1 + (BLOCK_BYTES - inner_span) // apart)
    for first in range(0, count, together):
        part = whole._replace(offset=whole.offset + first * apart, target=whole.target + first * to)
        if together == 1:
            yield from _reads(part._replace(axes=inner))
        else:
            some = (min(together, count - first), apart, to)
            yield part._replace(axes=(some, *inner))


def _span(axes: tuple[Axis, ...], run: int) -> int:
    return run + sum((count - 1) * apart for count, apart, _ in axes)


def _is_dense(axes: tuple[Axis, ...], run: int) -> bool:
    """Tell whether no gap is too large to be read along."""
    span = run
    for count, apart, _ in reversed(axes):
        if apart - span > GAP_BYTES:
            return False
        span += (count - 1) * apart
    return True
