"""Arrays as strided pieces of stored tensors: which bytes an array is made of. Pure, no MLX.

Every operation that only moves numbers (slices, splits, stacks, transposes, reshapes) maps strided
pieces to strided pieces, as numpy's `as_strided` does. So what is left of a checkpoint after a
model has renamed, stacked and split it is known without reading a byte.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A box of an array whose items lie at even distances in one stored tensor."""

    source: int
    """Which tensor."""
    offset: int
    """Where the box's first item is in it, in bytes."""
    strides: Shape
    """Bytes from one item to the next, by axis."""
    start: Shape
    """Where the box is in the array, by axis."""
    shape: Shape
    """How large the box is; no axis is 0."""


class Strided(NamedTuple):
    """An array whose pieces fill it without overlap."""

    shape: Shape
    item_bytes: int
    pieces: tuple[Piece, ...]


def stored(source: int, shape: Shape, item_bytes: int) -> Strided:
    """Return the array that is a whole tensor, row-major."""
    if 0 in shape:
        return Strided(shape, item_bytes, ())
    piece = Piece(source, 0, row_major(shape, item_bytes), (0,) * len(shape), shape)
    return Strided(shape, item_bytes, (piece,))


def cut(array: Strided, start: Shape, stop: Shape, step: Shape) -> Strided | None:
    """Return `array[start:stop:step]` per axis; None for steps that are not positive."""
    if any(size < 1 for size in step):
        return None
    counts = tuple(
        max(0, -(-(min(b, size) - a) // s))
        for a, b, s, size in zip(start, stop, step, array.shape, strict=True)
    )
    pieces = (_cut_piece(piece, start, step, counts) for piece in array.pieces)
    return Strided(counts, array.item_bytes, tuple(p for p in pieces if p is not None))


def split(array: Strided, borders: Sequence[int], axis: int) -> list[Strided | None]:
    """Return the parts between borders along an axis, as `numpy.split` does."""
    size = array.shape[axis]
    step = (1,) * len(array.shape)
    parts = []
    for low, high in itertools.pairwise([0, *borders, size]):
        start = tuple(low if i == axis else 0 for i in range(len(array.shape)))
        stop = tuple(high if i == axis else n for i, n in enumerate(array.shape))
        parts.append(cut(array, start, stop, step))
    return parts


def transposed(array: Strided, axes: Sequence[int]) -> Strided:
    """Return the array with its axes in another order."""
    pieces = tuple(
        piece._replace(
            strides=_pick(piece.strides, axes),
            start=_pick(piece.start, axes),
            shape=_pick(piece.shape, axes),
        )
        for piece in array.pieces
    )
    return Strided(_pick(array.shape, axes), array.item_bytes, pieces)


def joined(arrays: Sequence[Strided], axis: int) -> Strided:
    """Return arrays one after the other along an axis."""
    pieces, at = [], 0
    for array in arrays:
        for piece in array.pieces:
            start = (*piece.start[:axis], piece.start[axis] + at, *piece.start[axis + 1 :])
            pieces.append(piece._replace(start=start))
        at += array.shape[axis]
    first = arrays[0]
    shape = (*first.shape[:axis], at, *first.shape[axis + 1 :])
    return Strided(shape, first.item_bytes, tuple(pieces))


def repeated(array: Strided, shape: Shape) -> Strided:
    """Return the array broadcast to a shape."""
    new = len(shape) - len(array.shape)
    pieces = []
    for piece in array.pieces:
        strides, counts = [0] * new, list(shape[:new])
        for axis, size in enumerate(array.shape):
            grows = size == 1 and shape[new + axis] != 1
            strides.append(0 if grows else piece.strides[axis])
            counts.append(shape[new + axis] if grows else piece.shape[axis])
        start = (0,) * new + piece.start
        pieces.append(piece._replace(strides=tuple(strides), start=start, shape=tuple(counts)))
    kept = () if 0 in shape else tuple(pieces)
    return Strided(shape, array.item_bytes, kept)


def expanded(array: Strided, axes: Sequence[int]) -> Strided:
    """Return the array with axes of size 1 put in, which are counted in the result."""
    pieces = array.pieces
    shape = array.shape
    for axis in sorted(axes):
        shape = _with(shape, axis, 1)
        pieces = tuple(
            Piece(
                piece.source,
                piece.offset,
                _with(piece.strides, axis, 0),
                _with(piece.start, axis, 0),
                _with(piece.shape, axis, 1),
            )
            for piece in pieces
        )
    return Strided(shape, array.item_bytes, pieces)


def reshaped(array: Strided, shape: Shape) -> Strided | None:
    """Return the array with another shape of as many items, row-major; None if that needs a copy.

    Runs of axes of equal product are matched (as numpy does), so that pieces that are cut along one
    axis survive a reshape of the others.
    """
    if 0 in shape:
        return Strided(shape, array.item_bytes, ())
    groups = list(_matched_axes(array.shape, shape))
    pieces: list[Piece] = []
    for piece in array.pieces:
        options: list[list[_Box]] = []
        for old, new in groups:
            flat = _flattened(piece, array.shape, old)
            if flat is None:
                return None
            options.append(list(_unflattened(*flat, [shape[axis] for axis in new])))
        pieces.extend(_placed(piece, boxes) for boxes in itertools.product(*options))
    return Strided(shape, array.item_bytes, tuple(pieces))


def reinterpreted(array: Strided, item_bytes: int) -> Strided | None:
    """Return the array's bytes read as items of another size, along the last axis, as views do.

    None where the items that grow together do not lie together.
    """
    old = array.item_bytes
    if old == item_bytes:
        return array
    if not array.shape:
        return None
    large, small = max(old, item_bytes), min(old, item_bytes)
    factor = large // small
    if large % small:
        return None
    pieces = []
    for piece in array.pieces:
        start, count, stride = piece.start[-1], piece.shape[-1], piece.strides[-1]
        if stride != old and count > 1:
            return None
        if item_bytes > old and (start % factor or count % factor):
            return None
        start, count = (
            (start // factor, count // factor)
            if item_bytes > old
            else (start * factor, count * factor)
        )
        pieces.append(
            piece._replace(
                strides=(*piece.strides[:-1], item_bytes),
                start=(*piece.start[:-1], start),
                shape=(*piece.shape[:-1], count),
            )
        )
    last = array.shape[-1] * old // item_bytes
    return Strided((*array.shape[:-1], last), item_bytes, tuple(pieces))


class _Box(NamedTuple):
    """A piece's part in a group of axes."""

    offset: int
    strides: Shape
    start: Shape
    shape: Shape


def row_major(shape: Shape, item_bytes: int) -> Shape:
    """Return the distance in bytes between items along each axis, in memory without gaps."""
    return tuple(item_bytes * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _with(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis:])


def _pick(values: Shape, axes: Sequence[int]) -> Shape:
    return tuple(values[axis] for axis in axes)


def _cut_piece(piece: Piece, start: Shape, step: Shape, counts: Shape) -> Piece | None:
    """Return what a slice leaves of one piece."""
    offset = piece.offset
    strides, starts, shape = [], [], []
    for axis, (low, size) in enumerate(zip(piece.start, piece.shape, strict=True)):
        first = max(0, -(-(low - start[axis]) // step[axis]))
        end = min(counts[axis], -(-(low + size - start[axis]) // step[axis]))
        if end <= first:
            return None
        offset += (start[axis] + first * step[axis] - low) * piece.strides[axis]
        strides.append(piece.strides[axis] * step[axis])
        starts.append(first)
        shape.append(end - first)
    return Piece(piece.source, offset, tuple(strides), tuple(starts), tuple(shape))


def _placed(piece: Piece, boxes: Sequence[_Box]) -> Piece:
    """Return the part of a piece that has one box in each group of axes."""
    return Piece(
        piece.source,
        piece.offset + sum(box.offset for box in boxes),
        tuple(itertools.chain.from_iterable(box.strides for box in boxes)),
        tuple(itertools.chain.from_iterable(box.start for box in boxes)),
        tuple(itertools.chain.from_iterable(box.shape for box in boxes)),
    )


def _matched_axes(old: Shape, new: Shape) -> Iterator[tuple[range, range]]:
    """Yield the shortest runs of old and new axes with equal products, in order."""
    i = j = 0
    while i < len(old) or j < len(new):
        i0, j0 = i, j
        a = b = 1
        if i < len(old):
            a, i = a * old[i], i + 1
        if j < len(new):
            b, j = b * new[j], j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        yield range(i0, i), range(j0, j)


def _flattened(piece: Piece, shape: Shape, axes: range) -> tuple[int, int, int] | None:
    """Return (start, count, stride) of a piece on several axes made one; None if it is no range."""
    start, count, stride = 0, 1, 0
    for axis in axes:
        size, here = shape[axis], piece.shape[axis]
        if count > 1 and (here != size or (size > 1 and stride != piece.strides[axis] * size)):
            return None
        start = start * size + piece.start[axis]
        count *= here
        if here > 1:
            stride = piece.strides[axis]
    return start, count, stride


def _unflattened(start: int, count: int, stride: int, sizes: list[int]) -> Iterator[_Box]:
    """Yield the boxes that a range of a flat axis is on axes of the given sizes."""
    if not sizes:
        yield _Box(0, (), (), ())
        return
    if len(sizes) == 1:
        yield _Box(0, (stride,), (start,), (count,))
        return
    inner = math.prod(sizes[1:])
    at, end = start, start + count
    while at < end:
        row, column = divmod(at, inner)
        if column == 0 and end - at >= inner:
            rows = (end - at) // inner
            rest = next(_unflattened(0, inner, stride, sizes[1:]))
            taken = rows * inner
        else:
            rows, taken = 1, min(end - at, inner - column)
            for box in _unflattened(column, taken, stride, sizes[1:]):
                yield _Box(
                    (at - start) * stride + box.offset,
                    (stride * inner, *box.strides),
                    (row, *box.start),
                    (1, *box.shape),
                )
            at += taken
            continue
        yield _Box(
            (at - start) * stride,
            (stride * inner, *rest.strides),
            (row, *rest.start),
            (rows, *rest.shape),
        )
        at += taken
