"""Memory that MLX keeps for later is bounded, and within the bound it stays."""

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


def test_what_fits_stays_for_what_comes() -> None:
    """However many steps and tokens."""
    freed = FreedBuffers(bytes_max=4 * SIZE)
    _leave_a_buffer()
    for _ in range(CLEAR_EVERY_STEPS):
        freed.step_finished(_plan(CLEAR_EVERY_TOKENS))
    assert mx.get_cache_memory() >= SIZE


def test_what_is_too_much_is_given_back() -> None:
    """After so many tokens of prompts, or so many steps; not after each of them."""
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
