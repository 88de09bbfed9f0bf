"""Replays of a draft model's drafts: they gain much or cost almost nothing."""

import pytest

from services.scheduler.speculation.sequence_drafts import DecodingRow
from shared.messages import Speculation
from tests.unit.scheduler.speculation import replay
from tests.unit.scheduler.speculation.replay import (
    Device,
    Replay,
    draw_draft_hits,
    make_speculator,
    text_with_hits,
)

GPU = Device(fixed_ms=10.0, token_ms=0.04, draft_ms=1.5, draft_token_ms=0.005)
SMALL_GPU = Device(3.0, 0.02, 0.8, 0.01, build_ms=2.5)
CPU = Device(2.0, 1.5, 0.3, 0.2)
DEMO_CPU = Device(3.0, 0.27, 0.8, 0.05)
FAR = Device(4.0, 0.02, 1.0, 0.005, round_trip_ms=12.0)
NOISY = Device(3.0, 0.02, 0.8, 0.01, build_ms=2.5, noise=0.25)
SLOW_DRAFT_MODEL = Device(10.0, 0.04, 8.0, 0.02)
"""Its draft model is nearly as slow as the model."""
DEVICES = {
    "gpu": GPU,
    "small_gpu": SMALL_GPU,
    "cpu": CPU,
    "demo_cpu": DEMO_CPU,
    "far": FAR,
    "noisy": NOISY,
    "heavy": SLOW_DRAFT_MODEL,
}


def texts(quality: float, rows: int) -> list[list[bool]]:
    return [draw_draft_hits(quality, 400, seed) for seed in range(rows)]


def measure_model_speedup(
    device: Device, texts: list[list[bool]], *, prompt: int = 0, rounds: int = 1
) -> tuple[float, Replay]:
    """Return tokens per millisecond relative to a run without drafts, and the last round's
    replay."""
    return replay.measure_speedup(
        device,
        lambda seed: text_with_hits(texts[seed], prompt),
        len(texts),
        make_speculator("draft_model"),
        rounds=rounds,
    )


@pytest.mark.proof
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("quality", [0.05, 0.3])
@pytest.mark.parametrize("device", DEVICES)
def test_bad_drafts_of_known_draft_model_cost_at_most_3_percent(
    device: str, quality: float, rows: int
) -> None:
    """Once a server knows its draft model, bad drafts cost at most 3 %."""
    assert (
        measure_model_speedup(DEVICES[device], texts(quality, rows), prompt=100, rounds=2)[0]
        >= 0.97
    )


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("device", DEVICES)
def test_measuring_drafts_costs_first_requests_at_most_10_percent(device: str, rows: int) -> None:
    """The first requests of a server lose at most a tenth to measurements."""
    assert measure_model_speedup(DEVICES[device], texts(0.1, rows), prompt=100)[0] >= 0.9


@pytest.mark.parametrize("rows", [1, 8])
def test_draft_model_nearly_as_slow_as_target_is_not_used(rows: int) -> None:
    """A draft model that is nearly as slow as the model is not used, however good its drafts
    are."""
    ratio, replay = measure_model_speedup(SLOW_DRAFT_MODEL, texts(0.9, rows), rounds=2)
    assert ratio >= 0.97
    assert replay.drafted_share < 0.1


@pytest.mark.parametrize(
    ("device", "rows", "least"),
    [("gpu", 1, 1.8), ("gpu", 8, 1.6), ("small_gpu", 1, 1.15), ("demo_cpu", 1, 1.2)],
)
def test_good_drafts_of_fast_draft_model_save_time(device: str, rows: int, least: float) -> None:
    """Where a draft forward is cheap, drafts gain from the first request on."""
    assert measure_model_speedup(DEVICES[device], texts(0.9, rows))[0] >= least


def test_draft_model_is_used_for_one_row_but_not_32() -> None:
    """The same draft model is used for one row and not for many."""
    few, some = measure_model_speedup(DEMO_CPU, texts(0.9, 1), rounds=2)
    many, none = measure_model_speedup(DEMO_CPU, texts(0.9, 32), rounds=2)
    assert few > 1.2
    assert many >= 0.97
    assert some.drafted_share > 0.6
    assert none.drafted_share < 0.1


def test_drafts_resume_when_text_becomes_easy() -> None:
    """Probes detect within some hundred steps that drafts are right again."""
    text = [*draw_draft_hits(0.05, 600, 1), *([True] * 1_500)]
    ratio, replay = measure_model_speedup(GPU, [text])
    assert ratio > 1.3
    late = replay.decisions[-100:]
    assert sum(map(bool, late)) > 80


def test_draft_row_without_prompt_reads_it_before_proposing_drafts() -> None:
    """A draft row that lacks its prompt reads it before it proposes drafts."""
    ratio, replay = measure_model_speedup(GPU, texts(0.95, 1), prompt=2_000)
    assert ratio > 1.8
    assert sum(replay.reads) >= 2_000
    assert max(replay.reads) <= 2_048


@pytest.mark.parametrize(("left", "drafts"), [(2, 1), (3, 2), (6, 5), (9, 5)])
def test_drafts_leave_room_for_one_token_before_length_limit(left: int, drafts: int) -> None:
    """One token comes after the drafts, and none exceeds the longest length."""
    one = make_speculator("draft_model", adaptive=False)
    drafting = one.new_draft_state([], Speculation())
    assert one.choose([DecodingRow(drafting, 0, left)]).counts == [drafts]
    assert one.choose([DecodingRow(drafting, 1, left + 1)]).counts == [drafts], "one is in flight"
    assert one.choose([DecodingRow(drafting, 0, 1)]).counts == []
