"""Chunk sizes and step times that are learnt from receipts."""

import itertools

from services.scheduler.batch import chunk_grid
from services.scheduler.batch.step_timing import StepTiming


def run_chunks(
    timing: StepTiming, token_ms: float, decoding: bool, fixed_ms: float = 0.0, count: int = 12
) -> list[int]:
    """Run chunks of a model that takes `token_ms` per token; return their sizes."""
    sizes = []
    for _ in range(count):
        size = timing.chunk_tokens(decoding=decoding)
        sizes.append(size)
        chunk_ms = fixed_ms + size * token_ms
        timing.record_step(size, 4 if decoding else 0, chunk_ms + (20.0 if decoding else 0.0))
    return sizes


def test_prefill_chunks_grow_at_most_twofold_up_to_decode_stall_limit() -> None:
    """Chunks approach decode_stall_ms from below and at most double."""
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 4, 20.0)
    sizes = run_chunks(timing, token_ms=0.1, decoding=True)
    assert sizes[0] == 128
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(sizes))
    assert 1_250 <= sizes[-1] <= 1_350, "0.9 of the allowed stall"


def test_first_chunk_follows_prefill_time_that_ranks_have_measured() -> None:
    """A fast device begins with a chunk twice as long as the measured prompt, a slow one with one
    that fits the allowed stall; without a measurement the first chunk is short."""
    fast, slow, unknown = (StepTiming(decode_stall_ms=150.0) for _ in range(3))
    fast.assume_prefill(1_024, 40.0)
    slow.assume_prefill(64, 640.0)
    unknown.assume_prefill(0, 0.0)
    assert fast.chunk_tokens(decoding=True) == 2_048
    assert slow.chunk_tokens(decoding=True) == 16
    assert unknown.chunk_tokens(decoding=True) == 128


def test_slow_first_prefill_chunk_makes_next_chunk_small() -> None:
    """A slow first chunk is enough to make the next one small."""
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 4, 20.0)
    timing.record_step(128, 4, 20.0 + 128 * 10.0)
    assert timing.chunk_tokens(decoding=True) == 16


def test_next_prefill_chunk_shrinks_when_token_cost_rises() -> None:
    """A token costs more deep in a prompt than at its start: the next chunk already reflects it."""
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 4, 20.0)
    before = run_chunks(timing, token_ms=0.1, decoding=True)[-1]
    timing.record_step(before, 4, 20.0 + before * 0.4)
    assert timing.chunk_tokens(decoding=True) < 0.35 * before


def test_prefill_chunks_return_to_earlier_size_after_slow_steps() -> None:
    """Some slow steps leave no small chunks behind, with a fixed cost per forward or without."""
    for fixed_ms, token_ms in ((5.0, 0.28), (60.0, 0.02)):
        timing = StepTiming(decode_stall_ms=150.0)
        timing.record_step(0, 4, 20.0)
        before = run_chunks(timing, token_ms, True, fixed_ms, 16)[-1]

        assert run_chunks(timing, 10 * token_ms, True, 10 * fixed_ms, 4)[-1] < before / 4
        assert run_chunks(timing, token_ms, True, fixed_ms, 16)[-1] >= 0.9 * before


def test_prefill_chunks_grow_when_fixed_cost_per_forward_dominates() -> None:
    """Where 16 tokens take as long as 256, chunks grow until they use the allowed time."""
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 4, 20.0)
    for size in (64, 16, 16):
        timing.record_step(size, 4, 20.0 + 110.0)
    sizes = []
    for _ in range(12):
        size = timing.chunk_tokens(decoding=True)
        sizes.append(size)
        timing.record_step(size, 4, 20.0 + 80.0 + 0.02 * size)
        timing.record_step(6, 4, 20.0 + 80.0)
    assert sizes[-1] > 1_000, sizes
    assert max(80.0 + 0.02 * size for size in sizes) <= 150.0


def test_after_fast_chunks_only_second_slow_chunk_in_row_shrinks_next_chunk() -> None:
    """After fast chunks, one that takes seconds may compile a kernel and is ignored; a second one
    in a row counts.
    """
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 4, 20.0)
    before = run_chunks(timing, token_ms=0.1, decoding=True)[-1]
    timing.record_step(before, 4, 7_000.0)
    assert timing.chunk_tokens(decoding=True) == before
    timing.record_step(before, 4, 20.0 + before * 0.1)
    timing.record_step(before, 4, 7_000.0)
    timing.record_step(before, 4, 7_000.0)
    assert timing.chunk_tokens(decoding=True) < 0.1 * before, "two slow chunks in a row count"


def test_chunks_deep_in_long_prompt_keep_decode_stall_limit() -> None:
    """Chunks deep in a long prompt, whose tokens cost more, delay decodes no longer."""
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 1, 5.0)
    stalls = []
    for _ in range(2):
        position = 0
        while position < 16_000:
            size = timing.chunk_tokens(decoding=True, position=position)
            size = chunk_grid.round_down(size, position)
            stall_ms = size * (0.1 + 0.0001 * (position + size / 2))
            stalls.append(stall_ms)
            timing.record_step(size, 1, 5.0 + stall_ms, position)
            position += size
    assert max(stalls) <= 150.0 * 1.15
    assert sorted(stalls)[len(stalls) // 2] <= 150.0
    timing.record_step(64, 1, 5.0 + 64 * 0.1, 0)
    assert timing.chunk_tokens(decoding=True, position=0) > 800, (
        "short prompts must keep large chunks"
    )


def test_prefill_chunk_may_last_a_second_when_no_sequence_decodes() -> None:
    """Without decodes to delay, a chunk may take about a second."""
    timing = StepTiming(decode_stall_ms=150.0)
    assert 900 <= run_chunks(timing, token_ms=1.0, decoding=False)[-1] <= 1_000


def test_decode_time_of_unmeasured_row_count_scales_from_nearest_measured_one() -> None:
    """The time of an unmeasured number of rows is scaled from the nearest measured one."""
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 4, 10.0)
    assert timing.decode_ms(4) == 10.0
    assert timing.decode_ms(8) == 20.0
    assert timing.decode_ms(2) == 10.0
