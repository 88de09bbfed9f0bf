"""Arrays of MLX as the target of file reads, filled by any thread without a copy."""

import threading
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from services.rank_worker.kv_cache.blocks.items import SpillItem
from services.rank_worker.kv_cache.stored import arrays
from tests.support.waiting import wait_until
from tests.unit.rank_worker.stored.scripted_store import ScriptedStore
from tests.unit.rank_worker.stored.stored_rank import (
    Rank,
    block_hash,
    restore_items,
    scripted_store,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ScriptedStore]:
    with scripted_store(tmp_path) as store:
        yield store


def test_bytes_written_to_view_appear_in_mlx_array() -> None:
    """Bytes written to the view are the bytes of the array, for any size."""
    for size_bytes in (0, 1, 63, 1_000, 3_000_001):
        view, array = arrays.allocate(size_bytes)
        written = bytes(n % 251 for n in range(size_bytes))
        view[:] = written
        view.release()

        assert (array.dtype, array.shape) == (mx.uint8, (size_bytes,))
        assert bytes(memoryview(array)) == written  # type: ignore[arg-type]


def test_array_filled_by_other_thread_gives_equal_matrix_product_in_main_thread() -> None:
    """Computations of the main thread with an array that another thread filled give equal
    results.
    """
    expected = mx.random.normal((64, 128)).astype(mx.float16)
    data = bytes(memoryview(expected.view(mx.uint8).reshape(-1)))  # type: ignore[arg-type]
    filled: list[mx.array] = []

    def fill() -> None:
        view, array = arrays.allocate(len(data))
        view[:] = data
        view.release()
        filled.append(array)

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    rows = filled[0].view(mx.float16).reshape(64, 128)

    assert mx.array_equal(rows, expected)
    assert mx.array_equal(rows[3:9] @ rows.T, expected[3:9] @ expected.T)


def test_restored_block_arrays_equal_spilled_arrays_bit_for_bit(store: ScriptedStore) -> None:
    """Blocks of the main thread are spilled and restored bit for bit."""
    rank = Rank(store.address, allocate=arrays.allocate)
    kept = [mx.random.randint(0, 255, (300_000,)).astype(mx.uint8) for _ in range(20)]
    mx.eval(kept)
    rank.spill(
        *(
            SpillItem(block_hash(number), "block", 16, memoryview(array))  # type: ignore[arg-type]
            for number, array in enumerate(kept)
        )
    )
    wait_until(lambda: len(rank.stored) == 20)
    answer = rank.restore(restore_items(range(20)))
    taken = rank.adopt(answer.restore_id, 20)

    assert all(mx.array_equal(one.payload, array) for one, array in zip(taken, kept, strict=True))
