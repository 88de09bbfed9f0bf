"""Memory of blocks: eviction frees it, and no operation on blocks copies rows."""

import gc
import threading

import mlx.core as mx
import numpy as np
import pytest

from tests.mlx.blocks.block_driver import BlockDriver, resident_bytes
from tests.mlx.executor_driver import ExecutorDriver, admission, make_prompt, prefill_chunk
from tests.mlx.models import MakeModel


def test_evicted_kv_blocks_free_their_memory_after_last_reader(make_model: MakeModel) -> None:
    """Eviction frees the memory of blocks; that of a spilled block after its last reader."""
    driver = BlockDriver(make_model("llama"), row_tokens=1_100, block_tokens=256)
    driver.step(
        admitted=[admission(1, 0, make_prompt(5, 1_030))],
        prefill_chunks=[prefill_chunk(1, 0, 1_030, 1_030)],
    )
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    driver.step()
    held = resident_bytes(driver.executor)
    assert held == 4 * 256 * driver.executor.store.bytes_per_token
    assert 0 <= mx.get_active_memory() - before - held < held // 20
    items = driver.spill(list(driver.resident)[:1], evict_blocks=list(driver.resident))
    assert resident_bytes(driver.executor) == 0
    copied = bytes(items[0].payload)
    assert held // 4 <= mx.get_active_memory() - before < held // 3
    assert bytes(items[0].payload) == copied
    del items

    gc.collect()
    assert mx.get_active_memory() - before < held // 20


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_spilled_block_bytes_stay_unchanged_while_plans_run_and_evict(
    make_model: MakeModel, family: str
) -> None:
    """Another thread reads the same spilled bytes while plans run and evict."""
    driver = BlockDriver(make_model(family))
    driver.start_from_blocks(1, 1, make_prompt(1, 20))
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
        driver.start_from_blocks(one, 0, make_prompt(one, 18))
        driver.step(dropped=[one], decodes=[1])
    reader.join()

    assert unequal == []
    assert any(any(one) for one in first)


def test_keeping_many_blocks_takes_temporary_memory_below_limit_for_one_copy(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeping any number of blocks takes less temporary memory than the limit for blocks copied
    together.
    """
    model = make_model("llama")
    driver = BlockDriver(model, row_count=4, row_tokens=1_100, block_tokens=64)
    size = driver.executor.store.block_bytes(64)
    monkeypatch.setattr(driver.executor.store, "run_bytes_max", 12 * size)
    prompts = {one: make_prompt(one, 1_030) for one in (1, 2, 3, 4)}
    driver.step(
        admitted=[admission(one, one - 1, prompt) for one, prompt in prompts.items()],
        prefill_chunks=[prefill_chunk(one, 0, 1_030, 1_030) for one in prompts],
    )
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    driver.step()

    held = resident_bytes(driver.executor)
    assert held == 4 * 16 * size
    assert mx.get_peak_memory() - before < held + 12 * size


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_keeping_spilling_evicting_and_reusing_blocks_copy_no_kv_rows(
    make_model: MakeModel, family: str
) -> None:
    """Keeping, spilling, evicting and reusing blocks never copy the rows of even one layer."""
    driver = BlockDriver(make_model(family), row_count=8, row_tokens=4_096, block_tokens=64)
    per_token = driver.executor.store.bytes_per_token
    layer_bytes = per_token * 8 * 4_096 // 3
    prompt = make_prompt(5, 150)
    driver.step(admitted=[admission(9, 7, [1, 2, 3])], prefill_chunks=[prefill_chunk(9, 0, 3, 3)])
    driver.step(admitted=[admission(1, 0, prompt)], prefill_chunks=[prefill_chunk(1, 0, 10, 150)])
    driver.step(prefill_chunks=[prefill_chunk(1, 10, 20, 150)], decodes=[9])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    stops = range(20, 151, 10)
    launched = [
        driver.launch(
            prefill_chunks=[prefill_chunk(1, stop - 10, stop, 150)] if stop > 20 else [],
            decodes=[9],
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
def test_plan_keeping_blocks_and_moving_rows_copies_no_kv_rows(
    make_model: MakeModel, family: str
) -> None:
    """A plan that keeps the tails of dropped rows and moves the others copies no rows."""
    driver = BlockDriver(make_model(family), row_count=8, row_tokens=4_096, block_tokens=64)
    layer_bytes = driver.executor.store.bytes_per_token * 8 * 4_096 // 3
    for one in range(8):
        driver.start_from_blocks(one, one, make_prompt(one, 70 + one))
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
def test_checkpoint_of_sliding_window_after_long_prefill_chunk_holds_only_window(
    make_model: MakeModel, family: str
) -> None:
    """A checkpoint taken after a prefill chunk longer than the window holds only the window."""
    held = []
    for checkpoints in ([], [1]):
        driver = ExecutorDriver(make_model(family), row_tokens=2_100)
        prompt = make_prompt(5, 2_060)
        driver.step(
            admitted=[admission(1, 0, prompt)],
            prefill_chunks=[prefill_chunk(1, 0, 2_048, 2_060)],
            checkpoints=checkpoints,
        )
        driver.step(prefill_chunks=[prefill_chunk(1, 2_048, 2_058, 2_060)])
        gc.collect()
        mx.clear_cache()
        held.append(mx.get_active_memory())
        per_row = driver.executor.kv_bytes_per_row
        del driver
        gc.collect()

    assert 0 < held[1] - held[0] < 2 * per_row


def test_spilled_blocks_on_cuda_are_copies_with_equal_bytes_at_other_addresses(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA, where reads by the host would move the memory, a spill returns copies with the same
    bytes.
    """
    driver = BlockDriver(make_model("qwen3"))
    driver.start_from_blocks(1, 1, make_prompt(1, 20))
    driver.step()
    names = list(driver.resident)
    shared = driver.spill(names)
    monkeypatch.setattr(driver.executor.blocks, "_copies_spills", True)

    copies = driver.spill(names)

    assert [bytes(one.payload) for one in copies] == [bytes(one.payload) for one in shared]
    places = [{_address(one.payload) for one in items} for items in (shared, copies)]
    assert not places[0] & places[1]


def _address(payload: memoryview) -> int:
    return int(np.frombuffer(payload, dtype=np.uint8).ctypes.data)
