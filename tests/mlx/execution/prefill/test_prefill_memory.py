"""Memory of prefills beside many large rows: none of these rows is copied."""

import mlx.core as mx
import pytest

from services.rank_worker.device.execution_profile import ExecutionProfile
from tests.mlx.executor_driver import (
    ExecutorDriver,
    admission,
    make_executor,
    make_prompt,
    prefill_chunk,
)
from tests.mlx.models import MakeModel

ROW_COUNT, ROW_TOKENS = 8, 8_192


@pytest.mark.parametrize("pads", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_prefill_chunks_and_joins_beside_decodes_ahead_copy_no_kv_rows(
    make_model: MakeModel, family: str, pads: bool
) -> None:
    """While decodes are in flight, sequences join and prompts are prefilled, alone and in groups;
    the rows of not even one layer are copied."""
    model = make_model(family)
    driver = ExecutorDriver(model, ROW_COUNT, ROW_TOKENS)
    driver.executor = make_executor(model, profile=ExecutionProfile(pads_prefill=pads))
    per_token = driver.executor.store.bytes_per_token
    layer_bytes = per_token * ROW_COUNT * ROW_TOKENS // 3
    for one in (1, 2):
        driver.start(one, one, make_prompt(one, 40 + one))
    driver.step(decodes=[1, 2])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    ahead = driver.launch(decodes=[1, 2])
    for start in range(0, 120, 40):
        launched = driver.launch(
            admitted=[admission(3, 0, make_prompt(3, 120))] if not start else [],
            prefill_chunks=[prefill_chunk(3, start, start + 40, 120)],
            decodes=[1, 2],
        )
        driver.finish(ahead)
        ahead = launched
    group = driver.launch(
        admitted=[admission(one, one, make_prompt(one, 50)) for one in (4, 5, 6)],
        prefill_chunks=[prefill_chunk(one, 0, 50, 50) for one in (4, 5, 6)],
        decodes=[3, 1, 2],
    )
    driver.finish(ahead)
    last = driver.launch(
        admitted=[admission(7, 7, make_prompt(7, 30)), admission(8, 3, make_prompt(8, 60))],
        prefill_chunks=[prefill_chunk(7, 0, 30, 30), prefill_chunk(8, 0, 60, 60)],
        decodes=[3, 1, 2, 4, 5, 6],
    )
    driver.finish(group)
    driver.finish(last)

    assert mx.get_active_memory() - before < layer_bytes // 8
    assert mx.get_peak_memory() - before < layer_bytes // 4
