"""Replays of n-gram drafts: they gain much or cost almost nothing."""

import random
from collections.abc import Callable

import pytest

from tests.unit.scheduler.speculation import replay
from tests.unit.scheduler.speculation.replay import Device, Replay, ReplayedText, make_speculator

GPU = Device(fixed_ms=10.0, token_ms=0.04)
"""Bound by memory: another token costs almost nothing."""
SMALL_GPU = Device(fixed_ms=3.0, token_ms=0.02, build_ms=2.5)
"""A small model: the time exposed by waiting for results is as long as a step."""
CPU = Device(fixed_ms=2.0, token_ms=1.5)
"""Bound by computing: every token costs its time."""
DEMO_CPU = Device(fixed_ms=3.0, token_ms=0.27)
"""The demo model on two cores, as measured."""
FAR = Device(fixed_ms=4.0, token_ms=0.02, round_trip_ms=12.0)
"""Distant ranks: waiting for results takes three times a step."""
NOISY = Device(fixed_ms=3.0, token_ms=0.02, build_ms=2.5, noise=0.25)
NOISY_CPU = Device(fixed_ms=2.0, token_ms=1.5, noise=0.25)
DEVICES = {
    "gpu": GPU,
    "small_gpu": SMALL_GPU,
    "cpu": CPU,
    "demo_cpu": DEMO_CPU,
    "far": FAR,
    "noisy": NOISY,
    "noisy_cpu": NOISY_CPU,
}


def prose(seed: int, count: int) -> list[int]:
    """Return words by their frequency in language: pairs repeat by chance and continue
    differently."""
    rng = random.Random(seed)
    return rng.choices(range(8_000), [1 / (rank + 2) for rank in range(8_000)], k=count)


def plain_text(seed: int) -> ReplayedText:
    return ReplayedText(prose(seed, 600), prose(seed + 1_000, 500))


def copied_text(seed: int) -> ReplayedText:
    """Return an edited copy: the prompt's text again with a few changed words."""
    prompt = prose(seed, 700)
    rng = random.Random(seed)
    copy = [rng.randrange(8_000) if rng.random() < 0.015 else token for token in prompt[100:]]
    return ReplayedText(prompt, copy)


def code_text(seed: int) -> ReplayedText:
    """Return lines of a few forms, with names from a short list."""
    rng = random.Random(seed)
    forms = [[rng.randrange(100, 8_000) for _ in range(12)] for _ in range(6)]
    tokens = []
    for _ in range(90):
        line = list(rng.choice(forms))
        for place in (3, 8):
            line[place] = rng.randrange(20)
        tokens += line
    return ReplayedText(tokens[:500], tokens[500:])


def misleading_text(seed: int) -> ReplayedText:
    """Return one line many times with different last words: long matches that fail."""
    rng = random.Random(seed)
    line = [rng.randrange(8_000) for _ in range(7)]
    tokens = []
    for _ in range(100):
        tokens += [token for token in line if rng.random() < 0.6]
        tokens.append(rng.randrange(8_000))
    return ReplayedText(tokens[:200], tokens[200:])


def mixed_text(seed: int) -> ReplayedText:
    """Return prose, a copy of it, and prose again."""
    first, last = prose(seed, 200), prose(seed + 7, 200)
    return ReplayedText(prose(seed + 9, 300), first + first + last)


def measure_ngram_speedup(
    device: Device, make: Callable[[int], ReplayedText], rows: int
) -> tuple[float, Replay]:
    """Return tokens per millisecond relative to a run without speculation, and the replay."""
    return replay.measure_speedup(device, make, rows, make_speculator("ngram"))


@pytest.mark.proof
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("device", DEVICES)
def test_ngram_speculation_slows_prose_at_most_3_percent(device: str, rows: int) -> None:
    """On prose speculation costs at most 3 % on every device."""
    assert measure_ngram_speedup(DEVICES[device], plain_text, rows)[0] >= 0.97


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("device", DEVICES)
def test_ngram_matches_that_always_fail_cost_at_most_3_percent(device: str, rows: int) -> None:
    """Text whose matches always fail is detected."""
    assert measure_ngram_speedup(DEVICES[device], misleading_text, rows)[0] >= 0.97


@pytest.mark.proof
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("make", [copied_text, code_text, mixed_text])
@pytest.mark.parametrize("device", ["cpu", "demo_cpu", "far", "noisy", "noisy_cpu"])
def test_drafts_too_expensive_to_gain_cost_at_most_3_percent(
    device: str, make: Callable[[int], ReplayedText], rows: int
) -> None:
    """Where drafts lose, that is detected within a few steps, also with noisy times."""
    assert measure_ngram_speedup(DEVICES[device], make, rows)[0] >= 0.97


@pytest.mark.parametrize(("rows", "least"), [(1, 1.8), (8, 1.8), (32, 1.5)])
def test_ngram_drafts_speed_up_copied_text_on_memory_bound_gpu(rows: int, least: float) -> None:
    """Copied text comes up to 1.8 times as fast on a GPU."""
    assert measure_ngram_speedup(GPU, copied_text, rows)[0] >= least


def test_ngram_drafts_speed_up_code_on_memory_bound_gpu() -> None:
    """Code that repeats its forms comes faster although its names differ."""
    assert measure_ngram_speedup(GPU, code_text, 1)[0] >= 1.4
    assert measure_ngram_speedup(GPU, code_text, 8)[0] >= 1.4


def test_ngram_drafts_speed_up_small_model_despite_waiting_for_results() -> None:
    """Waiting for results is weighed, and drafts still pay for copied texts."""
    assert measure_ngram_speedup(SMALL_GPU, copied_text, 1)[0] >= 1.2


def test_drafts_stop_on_prose_and_resume_on_copied_text() -> None:
    """Prose gets no drafts, a copy after it does within a few steps, and prose after that none."""
    ratio, replay = measure_ngram_speedup(GPU, mixed_text, 1)
    drafted = [place for place, drafts in enumerate(replay.decisions) if drafts]
    assert ratio > 1.2
    assert drafted[0] > 150, "prose has almost no drafts"
    assert len([place for place in drafted if place > drafted[0] + 90]) < 10


def test_ngram_drafts_are_verified_for_one_row_but_not_48() -> None:
    """The same device verifies drafts for few rows and not for many."""
    device = Device(fixed_ms=10.0, token_ms=1.5)
    few, some = measure_ngram_speedup(device, copied_text, 1)
    many, none = measure_ngram_speedup(device, copied_text, 48)
    assert few > 1.5
    assert many >= 0.97
    assert some.drafted_share > 0.6
    assert none.drafted_share < 0.1


def test_draft_decisions_are_equal_for_equal_texts_and_costs() -> None:
    """Decisions depend on texts and costs only."""
    first, second = (measure_ngram_speedup(GPU, code_text, 4)[1].decisions for _ in range(2))
    assert first == second
    assert any(first)
