"""What blocks cost: their own memory, which eviction gives back; rows are not copied."""

import gc
import threading
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from tests.mlx.blocks.block_driver import BlockDriver
from tests.mlx.executor_driver import Driver, admit, chunk, make_prompt

Make = Callable[[str], nn.Module]


def test_evicted_blocks_free_their_memory(make_model: Make) -> None:
    """Memory is as before once blocks are evicted, and a spilled one once nobody reads it."""
    driver = BlockDriver(make_model("llama"), row_tokens=1_100, block_tokens=256)
    driver.step(
        admitted=[admit(1, 0, make_prompt(5, 1_030))], prefill_chunks=[chunk(1, 0, 1_030, 1_030)]
    )
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    driver.step()
    held = driver.executor.resident_bytes
    assert held == 4 * 256 * driver.executor.kv_bytes_per_token
    assert 0 <= mx.get_active_memory() - before - held < held // 20
    items = driver.spill(list(driver.resident)[:1], evict_blocks=list(driver.resident))
    assert driver.executor.resident_bytes == 0
    copied = bytes(items[0].payload)
    assert held // 4 <= mx.get_active_memory() - before < held // 3
    assert bytes(items[0].payload) == copied
    del items

    gc.collect()
    assert mx.get_active_memory() - before < held // 20


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_spilled_bytes_are_read_beside_the_steps(make_model: Make, family: str) -> None:
    """Another thread reads what was spilled, as often as it likes, while plans go on and evict."""
    driver = BlockDriver(make_model(family))
    driver.begin(1, 1, make_prompt(1, 20))
    driver.step()
    items = driver.spill(list(driver.resident), evict_blocks=list(driver.resident))
    first = [bytes(item.payload) for item in items]
    unequal: list[bytes] = []

    def read() -> None:
        for _ in range(200):
            unequal.extend(
                item.hash
                for item, one in zip(items, first, strict=True)
                if bytes(item.payload) != one
            )

    reader = threading.Thread(target=read)
    reader.start()
    for one in range(10, 20):
        driver.begin(one, 0, make_prompt(one, 18))
        driver.step(dropped=[one], decodes=[1])
    reader.join()

    assert unequal == []
    assert any(any(one) for one in first)


def test_blocks_that_are_read_together_need_little_more(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many a plan keeps, of as many rows: what is copied on the way is one run's."""
    model = make_model("llama")
    driver = BlockDriver(model, row_count=4, row_tokens=1_100, block_tokens=64)
    size = driver.executor.block_payload_bytes(64)
    monkeypatch.setattr(driver.executor._store, "run_bytes_max", 12 * size)
    prompts = {one: make_prompt(one, 1_030) for one in (1, 2, 3, 4)}
    driver.step(
        admitted=[admit(one, one - 1, prompt) for one, prompt in prompts.items()],
        prefill_chunks=[chunk(one, 0, 1_030, 1_030) for one in prompts],
    )
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    driver.step()

    held = driver.executor.resident_bytes
    assert held == 4 * 16 * size
    assert mx.get_peak_memory() - before < held + 12 * size


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_blocks_copy_no_rows(make_model: Make, family: str) -> None:
    """Keeping, spilling, evicting and reusing need no memory but the blocks' own: no copy of even
    one layer's rows, also when the steps before are still running."""
    driver = BlockDriver(make_model(family), row_count=8, row_tokens=4_096, block_tokens=64)
    per_token = driver.executor.kv_bytes_per_token
    layer_bytes = per_token * 8 * 4_096 // 3
    prompt = make_prompt(5, 150)
    driver.step(admitted=[admit(9, 7, [1, 2, 3])], prefill_chunks=[chunk(9, 0, 3, 3)])
    driver.step(admitted=[admit(1, 0, prompt)], prefill_chunks=[chunk(1, 0, 10, 150)])
    driver.step(prefill_chunks=[chunk(1, 10, 20, 150)], decodes=[9])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    stops = range(20, 151, 10)
    launched = [
        driver.launch(
            prefill_chunks=[chunk(1, stop - 10, stop, 150)] if stop > 20 else [], decodes=[9]
        )
        for stop in stops
    ]
    for one in launched:
        driver.finish(one)
    again = [driver.admit(one, one, prompt[: 140 + one]) for one in (2, 3, 4)]
    driver.step(admitted=again, decodes=[9])
    driver.step(evict_blocks=list(driver.resident), decodes=[9])

    assert [one.reused_tokens for one in again] == [128, 128, 128]
    assert mx.get_peak_memory() - before < layer_bytes // 2


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_rows_that_are_kept_and_moved_at_once_are_not_copied(make_model: Make, family: str) -> None:
    """When most of a batch ends, tails are kept and the rest closes up: each moves its own row."""
    driver = BlockDriver(make_model(family), row_count=8, row_tokens=4_096, block_tokens=64)
    layer_bytes = driver.executor.kv_bytes_per_token * 8 * 4_096 // 3
    for one in range(8):
        driver.begin(one, one, make_prompt(one, 70 + one))
    driver.step(decodes=list(range(8)))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    ahead = driver.launch(decodes=list(range(8)))
    for one in range(4):
        driver.keep_tail(one)
    leaves = driver.launch(
        dropped=[0, 1, 2, 3], moves=[(7, 0), (6, 1), (5, 2), (4, 3)], decodes=[7, 6, 5, 4]
    )
    driver.finish(ahead)
    driver.finish(leaves)

    assert mx.get_peak_memory() - before < layer_bytes // 2


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_a_state_set_aside_holds_its_window_only(make_model: Make, family: str) -> None:
    """Not the long chunk that filled the window."""
    held = []
    for checkpoints in ([], [1]):
        driver = Driver(make_model(family), row_tokens=2_100)
        prompt = make_prompt(5, 2_060)
        driver.step(
            admitted=[admit(1, 0, prompt)],
            prefill_chunks=[chunk(1, 0, 2_048, 2_060)],
            checkpoints=checkpoints,
        )
        driver.step(prefill_chunks=[chunk(1, 2_048, 2_058, 2_060)])
        gc.collect()
        mx.clear_cache()
        held.append(mx.get_active_memory())
        per_row = driver.executor.kv_bytes_per_row
        del driver
        gc.collect()

    assert 0 < held[1] - held[0] < 2 * per_row


def test_where_reading_moves_memory_a_copy_is_spilled(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are the same, and the resident block's memory is not what the host reads."""
    driver = BlockDriver(make_model("qwen3"))
    driver.begin(1, 1, make_prompt(1, 20))
    driver.step()
    names = list(driver.resident)
    shared = driver.spill(names)
    monkeypatch.setattr(driver.executor._blocks, "_copies_spills", True)

    copies = driver.spill(names)

    assert [bytes(one.payload) for one in copies] == [bytes(one.payload) for one in shared]
    places = [{_address(one.payload) for one in items} for items in (shared, copies)]
    assert not places[0] & places[1]


def _address(payload: memoryview) -> int:
    return int(np.frombuffer(payload, dtype=np.uint8).ctypes.data)
