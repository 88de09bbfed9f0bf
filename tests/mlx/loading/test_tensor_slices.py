"""Sliced arrays: operations on slices of stored tensors, compared with numpy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rank_worker.model.loading import tensor_slices
from services.rank_worker.model.loading.read_plan import (
    BLOCK_BYTES,
    GAP_BYTES,
    FileRead,
    plan_reads,
)
from services.rank_worker.model.loading.tensor_slices import SlicedArray
from services.rank_worker.model.loading.weight_reader import WeightReader
from shared.errors import ConfigError
from shared.model.checkpoint_files import WeightFile
from tests.support.effort import cases

Array = np.ndarray[Any, Any]


def _read(array: SlicedArray, tensors: list[Array]) -> Array:
    """Return the array, filled by its planned reads from these tensors."""
    out = np.zeros(int(np.prod(array.shape)) * array.item_bytes, np.uint8)
    filled = np.zeros_like(out, dtype=bool)
    for read in plan_reads(array):
        source = np.frombuffer(tensors[read.tensor].tobytes(), np.uint8)
        assert read.span_bytes <= max(BLOCK_BYTES, read.run_bytes)
        for index in np.ndindex(*(axis[0] for axis in read.axes)):
            at = read.offset + sum(i * axis[1] for i, axis in zip(index, read.axes, strict=True))
            to = read.target + sum(i * axis[2] for i, axis in zip(index, read.axes, strict=True))
            assert not filled[to : to + read.run_bytes].any()
            out[to : to + read.run_bytes] = source[at : at + read.run_bytes]
            filled[to : to + read.run_bytes] = True
    assert filled.all()
    return out.view(f"u{array.item_bytes}").reshape(array.shape)


def _random_operation(
    data: st.DataObject, array: SlicedArray, real: Array
) -> tuple[SlicedArray | None, Array]:
    """Apply a random operation of model code to a sliced array and to the numpy array."""
    axis = data.draw(st.integers(0, real.ndim - 1))
    size = real.shape[axis]
    match data.draw(st.sampled_from(["cut", "split", "turn", "join", "shape", "grow", "repeat"])):
        case "cut":
            low = data.draw(st.integers(0, size - 1))
            high = data.draw(st.integers(low + 1, size))
            step = data.draw(st.integers(1, 3))
            start = tuple(low if i == axis else 0 for i in range(real.ndim))
            stop = tuple(high if i == axis else n for i, n in enumerate(real.shape))
            steps = tuple(step if i == axis else 1 for i in range(real.ndim))
            index = tuple(map(slice, start, stop, steps))
            return tensor_slices.slice_array(array, start, stop, steps), real[index]
        case "split" if size > 1:
            border = data.draw(st.integers(1, size - 1))
            part = data.draw(st.integers(0, 1))
            return tensor_slices.split_array(array, [border], axis)[part], np.split(
                real, [border], axis
            )[part]
        case "turn":
            axes = data.draw(st.permutations(range(real.ndim)))
            return tensor_slices.transpose(array, axes), real.transpose(axes)
        case "join" if real.size < 300:
            return tensor_slices.concatenate([array, array], axis), np.concatenate(
                [real, real], axis
            )
        case "grow" if real.ndim < 5:
            expanded = np.expand_dims(real, axis)
            grown = tensor_slices.reshape(array, expanded.shape)
            assert grown is not None
            return grown, expanded
        case "repeat" if real.size < 300:
            shape = (2, *real.shape)
            return tensor_slices.broadcast(array, shape), np.broadcast_to(real, shape)
        case _:
            shapes = [(-1,), (real.size // 2, 2), (2, real.size // 2), real.shape[::-1]]
            shape = data.draw(st.sampled_from([s for s in shapes if np.prod(s) in (real.size, -1)]))
            shape = tuple(real.size if n == -1 else n for n in shape)
            return tensor_slices.reshape(array, shape), real.reshape(shape)


@settings(max_examples=cases(60, 300))
@given(st.data())
def test_random_operations_on_tensor_slices_read_numbers_of_numpy(data: st.DataObject) -> None:
    """Random sequences of operations on slices read the numbers that numpy computes."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    item = data.draw(st.sampled_from([1, 2, 4]))
    count = data.draw(st.integers(1, 3))
    random = np.random.default_rng(7)
    tensors = [random.integers(0, 250, shape).astype(f"u{item}") for _ in range(count)]
    whole = [tensor_slices.whole_tensor(source, (1, *shape), item) for source in range(count)]
    array: SlicedArray | None = tensor_slices.concatenate(whole, 0)
    real = np.stack(tensors)
    for _ in range(data.draw(st.integers(0, 5))):
        assert array is not None
        array, changed = _random_operation(data, array, real)
        if array is None:
            # numpy does this reshape only with a copy.
            return
        real = changed
        assert array.shape == real.shape
    assert array is not None
    assert np.array_equal(_read(array, tensors), real)


@pytest.mark.parametrize(("old", "new"), [("u1", "u4"), ("u4", "u1"), ("u2", "u4"), ("u4", "u4")])
def test_tensor_slice_reinterpreted_as_other_dtype_equals_numpy_view(old: str, new: str) -> None:
    """Reinterpreting a slice as another dtype equals a numpy view of it."""
    tensor = np.arange(3 * 16, dtype=old).reshape(3, 16)
    whole = tensor_slices.whole_tensor(0, (3, 16), tensor.itemsize)
    part = tensor_slices.slice_array(whole, (1, 4), (3, 12), (1, 1))
    assert part is not None

    array = tensor_slices.reinterpret(part, np.dtype(new).itemsize)

    assert array is not None
    real = np.ascontiguousarray(tensor[1:3, 4:12]).view(new)
    assert np.array_equal(_read(array, [tensor]), real)


def test_unsupported_tensor_slice_operations_return_none() -> None:
    """A wider dtype over separate bytes, and negative steps, return None."""
    whole = tensor_slices.whole_tensor(0, (16,), 1)
    second = tensor_slices.slice_array(whole, (0,), (16,), (2,))

    assert second is not None
    assert tensor_slices.reinterpret(second, 2) is None
    assert tensor_slices.slice_array(whole, (15,), (-17,), (-1,)) is None


def _columns(rows: int, run: int, gap: int) -> list[FileRead]:
    whole = tensor_slices.whole_tensor(0, (rows, run + gap), 1)
    part = tensor_slices.slice_array(whole, (0, 0), (rows, run), (1, 1))
    assert part is not None
    return list(plan_reads(part))


def test_contiguous_bytes_are_read_together_up_to_size_limit() -> None:
    """Contiguous bytes are read together, up to the size of a block."""
    whole = list(plan_reads(tensor_slices.whole_tensor(0, (3, BLOCK_BYTES // 2), 1)))

    assert [read.span_bytes for read in whole] == [BLOCK_BYTES, BLOCK_BYTES // 2]


def test_columns_with_small_gaps_are_read_in_one_piece() -> None:
    """Columns with small gaps are read in one piece; with large gaps each row is read
    separately.
    """
    near = _columns(50, 1_000, GAP_BYTES)
    far = _columns(50, 1_000, GAP_BYTES + 1)

    assert len(near) == 1
    assert near[0].axes == ((50, 1_000 + GAP_BYTES, 1_000),)
    assert [read.span_bytes for read in far] == [1_000] * 50


def _file(path: Path, count: int) -> WeightFile:
    data = np.random.default_rng(3).integers(0, 250, count).astype(np.uint8).tobytes()
    path.write_bytes(b"\0" * 8 + b"{}" + data)
    return WeightFile(path, path.stat().st_size, b"{}")


def test_threaded_reader_fills_memory_from_several_files_and_counts_bytes(tmp_path: Path) -> None:
    """A threaded reader fills memory from several files and counts the bytes that it read."""
    files = [_file(tmp_path / name, 9 * 1024 * 1024) for name in ("a", "b")]
    tensors = [np.fromfile(file.path, np.uint8)[10:].reshape(3 * 1024, -1) for file in files]
    whole = [tensor_slices.whole_tensor(source, (3 * 1024, 3 * 1024), 1) for source in (0, 1)]
    array = tensor_slices.slice_array(
        tensor_slices.concatenate(whole, 0), (5, 7), (6_000, 3_001), (1, 1)
    )
    assert array is not None
    memory = bytearray(int(np.prod(array.shape)))

    with WeightReader(files, [(0, 10), (1, 10)]) as reader:
        reader.read(array, memoryview(memory))
        reader.check_unchanged()

    expected = np.concatenate(tensors)[5:6_000, 7:3_001]
    assert np.array_equal(np.frombuffer(memory, np.uint8).reshape(array.shape), expected)
    assert len(memory) < reader.bytes_read < 1.03 * len(memory)


def _truncate(path: Path) -> None:
    with path.open("rb+") as stream:
        stream.truncate(1_000)


def _replace(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "changed while it was read"),
        (_replace, "changed while it was read"),
        (Path.unlink, "No such file"),
    ],
)
def test_error_names_file_changed_between_two_reads(
    tmp_path: Path, damage: Any, message: str
) -> None:
    """A file that is truncated, replaced or deleted between two reads is named in the error."""
    file = _file(tmp_path / "model.safetensors", 10_000)
    array = tensor_slices.whole_tensor(0, (10_000,), 1)
    memory = memoryview(bytearray(10_000))
    with WeightReader([file], [(0, 10)]) as reader:
        reader.read(array, memory)
        damage(file.path)
        with pytest.raises(ConfigError, match=message) as caught:
            reader.read(array, memory)
        with pytest.raises(ConfigError, match=message):
            reader.check_unchanged()

    assert str(file.path) in str(caught.value)


def test_error_names_file_whose_header_changed_since_read(tmp_path: Path) -> None:
    """A file whose header changed since it was read is named in the error."""
    file = _file(tmp_path / "model.safetensors", 10_000)
    file.path.write_bytes(file.path.read_bytes().replace(b"{}", b"[]", 1))
    with (
        WeightReader([file], [(0, 10)]) as reader,
        pytest.raises(ConfigError, match="changed while"),
    ):
        reader.read(tensor_slices.whole_tensor(0, (10_000,), 1), memoryview(bytearray(10_000)))
