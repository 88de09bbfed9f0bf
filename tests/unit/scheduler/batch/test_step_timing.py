"""What is learnt from receipts."""

import itertools

from services.scheduler.batch.step_timing import StepTiming


def learn(
    timing: StepTiming, token_ms: float, decoding: bool, fixed_ms: float = 0.0, count: int = 12
) -> list[int]:
    """Run chunks of a model that takes `token_ms` a token; return their sizes."""
    sizes = []
    for _ in range(count):
        size = timing.chunk_tokens(decoding=decoding)
        sizes.append(size)
        chunk_ms = fixed_ms + size * token_ms
        timing.record_step(size, 4 if decoding else 0, chunk_ms + (20.0 if decoding else 0.0))
    return sizes


def test_chunks_grow_to_the_allowed_stall() -> None:
    """Chunks approach decode_stall_ms from below, at most doubling."""
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 4, 20.0)
    sizes = learn(timing, token_ms=0.1, decoding=True)
    assert sizes[0] == 128
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(sizes))
    assert 1_250 <= sizes[-1] <= 1_350, "0.9 of the allowed stall"


def test_slow_model_gets_small_chunks_at_once() -> None:
    """One slow chunk is enough to make the next one small."""
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 4, 20.0)
    timing.record_step(128, 4, 20.0 + 128 * 10.0)
    assert timing.chunk_tokens(decoding=True) == 16


def test_prefill_that_slows_down_gets_smaller_chunks_at_once() -> None:
    """Deep in a prompt a token costs more than at its start: the next chunk already knows."""
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 4, 20.0)
    before = learn(timing, token_ms=0.1, decoding=True)[-1]
    timing.record_step(before, 4, 20.0 + before * 0.4)
    assert timing.chunk_tokens(decoding=True) < 0.35 * before


def test_chunks_are_large_again_after_a_slow_spell() -> None:
    """A machine that was busy for some steps leaves no small chunks behind, with a fixed cost per
    forward or without."""
    for fixed_ms, token_ms in ((5.0, 0.28), (60.0, 0.02)):
        timing = StepTiming(decode_stall_ms=150.0)
        timing.record_step(0, 4, 20.0)
        before = learn(timing, token_ms, True, fixed_ms, 16)[-1]

        assert learn(timing, 10 * token_ms, True, 10 * fixed_ms, 4)[-1] < before / 4
        assert learn(timing, token_ms, True, fixed_ms, 16)[-1] >= 0.9 * before


def test_a_fixed_cost_per_forward_does_not_keep_chunks_small() -> None:
    """Where 16 tokens take as long as 256, chunks still grow until they take their time."""
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


def test_a_kernel_that_is_compiled_once_does_not_make_chunks_small() -> None:
    """The first use of a shape may take seconds; the second time shows what it costs."""
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 4, 20.0)
    before = learn(timing, token_ms=0.1, decoding=True)[-1]
    timing.record_step(before, 4, 7_000.0)
    assert timing.chunk_tokens(decoding=True) == before
    timing.record_step(before, 4, 20.0 + before * 0.1)
    timing.record_step(before, 4, 7_000.0)
    timing.record_step(before, 4, 7_000.0)
    assert timing.chunk_tokens(decoding=True) < 0.1 * before, "twice is no accident"


def test_sizes_come_again() -> None:
    """Chunks that are not short are whole multiples of 64 tokens."""
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 4, 20.0)
    assert all(size % 64 == 0 for size in learn(timing, token_ms=0.1234, decoding=True))


def test_depth_in_the_prompt_counts() -> None:
    """A long prompt, whose tokens cost the more the deeper they are, holds decodes up no longer."""
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 1, 5.0)
    stalls = []
    for _ in range(2):
        position = 0
        while position < 16_000:
            size = timing.chunk_tokens(decoding=True, position=position)
            stall_ms = size * (0.1 + 0.0001 * (position + size / 2))
            stalls.append(stall_ms)
            timing.record_step(size, 1, 5.0 + stall_ms, position)
            position += size
    assert max(stalls) <= 150.0 * 1.15
    assert sorted(stalls)[len(stalls) // 2] <= 150.0
    timing.record_step(64, 1, 5.0 + 64 * 0.1, 0)
    assert timing.chunk_tokens(decoding=True, position=0) > 800, "short prompts are not punished"


def test_without_decodes_chunks_are_longer_but_bounded() -> None:
    """With nobody to hold up a chunk may take about a second."""
    timing = StepTiming(decode_stall_ms=150.0)
    assert 900 <= learn(timing, token_ms=1.0, decoding=False)[-1] <= 1_000


def test_more_rows_are_expected_to_take_longer() -> None:
    """An unmeasured number of rows is scaled from the nearest that was measured."""
    timing = StepTiming(decode_stall_ms=150.0)
    timing.record_step(0, 4, 10.0)
    assert timing.decode_ms(4) == 10.0
    assert timing.decode_ms(8) == 20.0
    assert timing.decode_ms(2) == 10.0
