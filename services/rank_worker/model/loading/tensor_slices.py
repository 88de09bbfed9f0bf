"""Arrays described as strided slices of stored tensors. Pure, no MLX; reads nothing.

Operations that only move numbers (slice, split, stack, transpose, reshape) map strided slices to
strided slices, like numpy's `as_strided`. So the stored bytes of a parameter are known even after a
model has renamed, stacked and split its tensors.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class TensorSlice(NamedTuple):
    """A rectangular part of an array, with items evenly spaced in one stored tensor."""

    tensor: int
    """Index of the stored tensor."""
    offset: int
    """Offset of the box's first item in the tensor, in bytes."""
    strides: Shape
    """Distance between items in the tensor, in bytes, by axis."""
    start: Shape
    """Index of the box's first item in the array, by axis."""
    shape: Shape
    """Number of items by axis, all positive."""


class SlicedArray(NamedTuple):
    """An array described by the slices of stored tensors that fill it without overlap."""

    shape: Shape
    item_bytes: int
    """Bytes of one item."""
    slices: tuple[TensorSlice, ...]


def whole_tensor(tensor: int, shape: Shape, item_bytes: int) -> SlicedArray:
    """Describe a whole stored tensor as an array of one slice.

    Args:
        tensor: number of the stored tensor, which its slices refer to.
        shape: its shape; the tensor is row-major.
        item_bytes: size of one item.
    """
    if 0 in shape:
        return SlicedArray(shape, item_bytes, ())
    part = TensorSlice(tensor, 0, row_major_strides(shape, item_bytes), (0,) * len(shape), shape)
    return SlicedArray(shape, item_bytes, (part,))


def slice_array(array: SlicedArray, start: Shape, stop: Shape, step: Shape) -> SlicedArray | None:
    """Return `array[start:stop:step]`; None when a step is not positive.

    Args:
        array: the array.
        start: first index, by axis.
        stop: index after the last one, by axis; may exceed the array.
        step: distance between indices, by axis.
    """
    if any(size < 1 for size in step):
        return None
    counts = tuple(
        max(0, -(-(min(b, size) - a) // s))
        for a, b, s, size in zip(start, stop, step, array.shape, strict=True)
    )
    slices = (_intersect(part, start, step, counts) for part in array.slices)
    return SlicedArray(counts, array.item_bytes, tuple(p for p in slices if p is not None))


def split_array(
    array: SlicedArray, boundaries: Sequence[int], axis: int
) -> list[SlicedArray | None]:
    """Split an array along an axis before each boundary, like `numpy.split`.

    Args:
        array: the array.
        boundaries: indices along the axis at which parts begin, ascending, without 0.
        axis: the axis.
    """
    size = array.shape[axis]
    step = (1,) * len(array.shape)
    origin = (0,) * len(array.shape)
    return [
        slice_array(array, _with(origin, axis, low), _with(array.shape, axis, high), step)
        for low, high in itertools.pairwise([0, *boundaries, size])
    ]


def transpose(array: SlicedArray, axes: Sequence[int]) -> SlicedArray:
    """Return the array with its axes in the given order, like `numpy.transpose`."""
    slices = tuple(
        part._replace(
            strides=_pick(part.strides, axes),
            start=_pick(part.start, axes),
            shape=_pick(part.shape, axes),
        )
        for part in array.slices
    )
    return SlicedArray(_pick(array.shape, axes), array.item_bytes, slices)


def concatenate(arrays: Sequence[SlicedArray], axis: int) -> SlicedArray:
    """Join arrays along an existing axis, like `numpy.concatenate`."""
    slices, at = [], 0
    for array in arrays:
        for part in array.slices:
            start = _with(part.start, axis, part.start[axis] + at)
            slices.append(part._replace(start=start))
        at += array.shape[axis]
    first = arrays[0]
    return SlicedArray(_with(first.shape, axis, at), first.item_bytes, tuple(slices))


def broadcast(array: SlicedArray, shape: Shape) -> SlicedArray:
    """Return the array broadcast to a shape, like `numpy.broadcast_to`."""
    new = len(shape) - len(array.shape)
    slices = []
    for part in array.slices:
        strides, counts = [0] * new, list(shape[:new])
        for axis, size in enumerate(array.shape):
            grows = size == 1 and shape[new + axis] != 1
            strides.append(0 if grows else part.strides[axis])
            counts.append(shape[new + axis] if grows else part.shape[axis])
        start = (0,) * new + part.start
        slices.append(part._replace(strides=tuple(strides), start=start, shape=tuple(counts)))
    kept = () if 0 in shape else tuple(slices)
    return SlicedArray(shape, array.item_bytes, kept)


def reshape(array: SlicedArray, shape: Shape) -> SlicedArray | None:
    """Return the array with another shape in row-major order; None when that needs a copy.

    Groups of old and new axes with equal products are matched, as numpy does, so an array that was
    sliced along one axis can still be reshaped along the others.
    """
    if 0 in shape:
        return SlicedArray(shape, array.item_bytes, ())
    groups = list(_match_axes(array.shape, shape))
    slices: list[TensorSlice] = []
    for part in array.slices:
        options: list[list[_Box]] = []
        for old, new in groups:
            flat = _flatten(part, array.shape, old)
            if flat is None:
                return None
            options.append(list(_unflatten(*flat, [shape[axis] for axis in new])))
        slices.extend(_combine(part, boxes) for boxes in itertools.product(*options))
    return SlicedArray(shape, array.item_bytes, tuple(slices))


def reinterpret(array: SlicedArray, item_bytes: int) -> SlicedArray | None:
    """Return the array's bytes as items of another size along the last axis, like `numpy.view`.

    Args:
        array: the array.
        item_bytes: bytes of each new item.

    Returns:
        None when the bytes of a larger item are not adjacent in the stored tensor.
    """
    old = array.item_bytes
    if old == item_bytes:
        return array
    if not array.shape or max(old, item_bytes) % min(old, item_bytes):
        return None
    slices = []
    for part in array.slices:
        start, start_rest = divmod(part.start[-1] * old, item_bytes)
        count, count_rest = divmod(part.shape[-1] * old, item_bytes)
        is_adjacent = part.strides[-1] == old or part.shape[-1] == 1
        if not is_adjacent or start_rest or count_rest:
            return None
        slices.append(
            part._replace(
                strides=(*part.strides[:-1], item_bytes),
                start=(*part.start[:-1], start),
                shape=(*part.shape[:-1], count),
            )
        )
    last = array.shape[-1] * old // item_bytes
    return SlicedArray((*array.shape[:-1], last), item_bytes, tuple(slices))


class _Box(NamedTuple):
    """The projection of a slice onto a group of axes; the fields are those of `TensorSlice`."""

    offset: int
    strides: Shape
    start: Shape
    shape: Shape


def row_major_strides(shape: Shape, item_bytes: int) -> Shape:
    """Return the strides of a contiguous row-major array, in bytes, by axis."""
    return tuple(item_bytes * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _with(values: Shape, axis: int, value: int) -> Shape:
    """Return the values with another one at an axis."""
    return (*values[:axis], value, *values[axis + 1 :])


def _pick(values: Shape, axes: Sequence[int]) -> Shape:
    return tuple(values[axis] for axis in axes)


def _intersect(part: TensorSlice, start: Shape, step: Shape, counts: Shape) -> TensorSlice | None:
    """Return the items of `part` that are selected; None without any.

    Args:
        part: a slice of the array.
        start: first selected index of the array, by axis.
        step: distance between selected indices, by axis.
        counts: number of selected indices, by axis.
    """
    offset = part.offset
    strides, starts, shape = [], [], []
    for axis, (low, size) in enumerate(zip(part.start, part.shape, strict=True)):
        first = max(0, -(-(low - start[axis]) // step[axis]))
        end = min(counts[axis], -(-(low + size - start[axis]) // step[axis]))
        if end <= first:
            return None
        offset += (start[axis] + first * step[axis] - low) * part.strides[axis]
        strides.append(part.strides[axis] * step[axis])
        starts.append(first)
        shape.append(end - first)
    return TensorSlice(part.tensor, offset, tuple(strides), tuple(starts), tuple(shape))


def _combine(part: TensorSlice, boxes: Sequence[_Box]) -> TensorSlice:
    """Return the part of a slice that lies in one box of each group of axes."""
    return TensorSlice(
        part.tensor,
        part.offset + sum(box.offset for box in boxes),
        tuple(itertools.chain.from_iterable(box.strides for box in boxes)),
        tuple(itertools.chain.from_iterable(box.start for box in boxes)),
        tuple(itertools.chain.from_iterable(box.shape for box in boxes)),
    )


def _match_axes(old: Shape, new: Shape) -> Iterator[tuple[range, range]]:
    """Yield the smallest groups of old and new axes with equal products, in order."""
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


def _flatten(part: TensorSlice, shape: Shape, axes: range) -> tuple[int, int, int] | None:
    """Return (start, count, stride) of a slice after merging axes; None when it is not a range.

    Args:
        part: a slice of the array.
        shape: shape of the array.
        axes: the axes to merge into one.
    """
    start, count, stride = 0, 1, 0
    for axis in axes:
        size, here = shape[axis], part.shape[axis]
        if count > 1 and (here != size or (size > 1 and stride != part.strides[axis] * size)):
            return None
        start = start * size + part.start[axis]
        count *= here
        if here > 1:
            stride = part.strides[axis]
    return start, count, stride


def _unflatten(start: int, count: int, stride: int, sizes: list[int]) -> Iterator[_Box]:
    """Yield the boxes that a range of one merged axis covers after splitting that axis.

    Args:
        start: first index of the range.
        count: number of items.
        stride: bytes between items.
        sizes: sizes of the axes to split into.
    """
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
        # Several whole rows form one box; a part of a row is divided further.
        rows = max(1, (end - at) // inner) if column == 0 else 1
        in_row = min(end - at, inner - column)
        for box in _unflatten(column, in_row, stride, sizes[1:]):
            yield _Box(
                (at - start) * stride + box.offset,
                (stride * inner, *box.strides),
                (row, *box.start),
                (rows, *box.shape),
            )
        at += rows * in_row
