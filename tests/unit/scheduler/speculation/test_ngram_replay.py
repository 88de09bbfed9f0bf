"""Drafts from a text's own words replayed: they bring much or cost next to nothing."""

import random
from collections.abc import Callable

import pytest

from tests.unit.scheduler.speculation import replay
from tests.unit.scheduler.speculation.replay import Device, Replay, ReplayedText, make_speculator

GPU = Device(fixed_ms=10.0, token_ms=0.04)
"""Bound by memory: a token more costs next to nothing."""
SMALL_GPU = Device(fixed_ms=3.0, token_ms=0.02, build_ms=2.5)
"""A small model: what lock-step exposes is as long as a step."""
CPU = Device(fixed_ms=2.0, token_ms=1.5)
"""Bound by computing: every token costs its time."""
DEMO_CPU = Device(fixed_ms=3.0, token_ms=0.27)
"""The demo model on two cores, as measured."""
FAR = Device(fixed_ms=4.0, token_ms=0.02, round_trip_ms=12.0)
"""Ranks far away: waiting for results takes three times a step."""
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
    """Words by their frequency in language: pairs come again by chance, and go on otherwise."""
    rnd = random.Random(seed)
    return rnd.choices(range(8_000), [1 / (rank + 2) for rank in range(8_000)], k=count)


def plain_text(seed: int) -> ReplayedText:
    return ReplayedText(prose(seed, 600), prose(seed + 1_000, 500))


def copied_text(seed: int) -> ReplayedText:
    """An edit: the prompt's text once more, with a word changed here and there."""
    prompt = prose(seed, 700)
    rnd = random.Random(seed)
    copy = [rnd.randrange(8_000) if rnd.random() < 0.015 else token for token in prompt[100:]]
    return ReplayedText(prompt, copy)


def code(seed: int) -> ReplayedText:
    """Lines of a few forms, with names from a short list."""
    rnd = random.Random(seed)
    forms = [[rnd.randrange(100, 8_000) for _ in range(12)] for _ in range(6)]
    tokens = []
    for _ in range(90):
        line = list(rnd.choice(forms))
        for place in (3, 8):
            line[place] = rnd.randrange(20)
        tokens += line
    return ReplayedText(tokens[:500], tokens[500:])


def trap(seed: int) -> ReplayedText:
    """One line again and again, each time with another word at the end: long matches that fail."""
    rnd = random.Random(seed)
    line = [rnd.randrange(8_000) for _ in range(7)]
    tokens = []
    for _ in range(100):
        tokens += [token for token in line if rnd.random() < 0.6]
        tokens.append(rnd.randrange(8_000))
    return ReplayedText(tokens[:200], tokens[200:])


def mixed_text(seed: int) -> ReplayedText:
    """Prose, then a copy of it, then prose again."""
    first, last = prose(seed, 200), prose(seed + 7, 200)
    return ReplayedText(prose(seed + 9, 300), first + first + last)


def gain(device: Device, make: Callable[[int], ReplayedText], rows: int) -> tuple[float, Replay]:
    """Return tokens per millisecond against the same without speculation."""
    return replay.measure_speedup(device, make, rows, make_speculator("ngram"))


@pytest.mark.proof
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_lost_on_text_without_repetition(device: str, rows: int) -> None:
    """On prose nothing is more than 3 % slower, whatever a step costs."""
    assert gain(DEVICES[device], plain_text, rows)[0] >= 0.97


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_lost_on_matches_that_fail(device: str, rows: int) -> None:
    """ReplayedText whose matches promise what never comes is found out."""
    assert gain(DEVICES[device], trap, rows)[0] >= 0.97


@pytest.mark.proof
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("make", [copied_text, code, mixed_text])
@pytest.mark.parametrize("device", ["cpu", "demo_cpu", "far", "noisy", "noisy_cpu"])
def test_nothing_is_lost_where_drafts_cost_more_than_they_save(
    device: str, make: Callable[[int], ReplayedText], rows: int
) -> None:
    """Where drafts lose, that is found out in a few steps, also by times that scatter."""
    assert gain(DEVICES[device], make, rows)[0] >= 0.97


@pytest.mark.parametrize(("rows", "least"), [(1, 1.8), (8, 1.8), (32, 1.5)])
def test_copies_come_faster_where_memory_bounds(rows: int, least: float) -> None:
    """Copied text comes 1.8 times as fast on a GPU."""
    assert gain(GPU, copied_text, rows)[0] >= least


def test_code_comes_faster_where_memory_bounds() -> None:
    """Code that repeats its forms comes faster, although its names differ."""
    assert gain(GPU, code, 1)[0] >= 1.4
    assert gain(GPU, code, 8)[0] >= 1.4


def test_small_models_gain_in_spite_of_lock_step() -> None:
    """What lock-step exposes is weighed, and still pays where whole texts are copied."""
    assert gain(SMALL_GPU, copied_text, 1)[0] >= 1.2


def test_drafts_stop_and_come_back() -> None:
    """Prose gets no drafts, a copy after it does within a few steps, prose after that none."""
    ratio, replay = gain(GPU, mixed_text, 1)
    drafted = [place for place, drafts in enumerate(replay.decisions) if drafts]
    assert ratio > 1.2
    assert drafted[0] > 150, "prose has next to no drafts"
    assert len([place for place in drafted if place > drafted[0] + 90]) < 10


def test_the_threshold_of_rows_is_learnt() -> None:
    """The same device verifies for few rows and not for many, by measured periods alone."""
    device = Device(fixed_ms=10.0, token_ms=1.5)
    few, some = gain(device, copied_text, 1)
    many, none = gain(device, copied_text, 48)
    assert few > 1.5
    assert many >= 0.97
    assert some.drafted_share > 0.6
    assert none.drafted_share < 0.1


def test_decisions_are_the_same_each_time() -> None:
    """Nothing but texts and costs decides."""
    first, second = (gain(GPU, code, 4)[1].decisions for _ in range(2))
    assert first == second
    assert any(first)
