"""Buffers that MLX keeps after they are freed: a bound on their bytes."""

import mlx.core as mx

from services.rank_worker.device.freed_buffers import (
    CLEAR_EVERY_STEPS,
    CLEAR_EVERY_TOKENS,
    FreedBuffers,
)
from shared.messages import PrefillChunk, StepPlan

SIZE = 4 * 1024 * 1024


def _plan(tokens: int = 0) -> StepPlan:
    chunks = [PrefillChunk(sequence_id=1, start=0, length=tokens, samples=False)] if tokens else []
    return StepPlan(
        epoch=1, step_id=1, deadline_s=0.0, row_count=1, row_tokens=1, prefill_chunks=chunks
    )


def _leave_a_buffer() -> None:
    mx.clear_cache()
    freed = mx.zeros((SIZE,), dtype=mx.uint8)
    mx.eval(freed)
    del freed
    assert mx.get_cache_memory() >= SIZE


def test_freed_mlx_buffers_within_bound_are_kept_over_many_steps() -> None:
    """Buffers within the bound are kept over any number of steps and tokens."""
    freed = FreedBuffers(bytes_max=4 * SIZE)
    _leave_a_buffer()
    for _ in range(CLEAR_EVERY_STEPS):
        freed.step_finished(_plan(CLEAR_EVERY_TOKENS))
    assert mx.get_cache_memory() >= SIZE


def test_freed_mlx_buffers_beyond_bound_are_released_periodically() -> None:
    """Buffers beyond the bound are released after a number of prompt tokens or of steps."""
    freed = FreedBuffers(bytes_max=SIZE // 2)
    _leave_a_buffer()
    freed.step_finished(_plan(CLEAR_EVERY_TOKENS - 1))
    assert mx.get_cache_memory() >= SIZE
    freed.step_finished(_plan(1))
    assert mx.get_cache_memory() == 0

    _leave_a_buffer()
    for _ in range(CLEAR_EVERY_STEPS - 1):
        freed.step_finished(_plan())
    assert mx.get_cache_memory() >= SIZE
    freed.step_finished(_plan())
    assert mx.get_cache_memory() == 0
