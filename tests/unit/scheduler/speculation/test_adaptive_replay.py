"""Replays of the adaptive policy against no drafts and against the best fixed number of drafts."""

from collections.abc import Callable

import pytest

from services.scheduler.speculation.methods import Method
from tests.unit.scheduler.speculation.replay import (
    Device,
    ReplayedPlan,
    ReplayedText,
    draw_draft_hits,
    make_replay,
    make_speculator,
    measure_speedup,
    text_with_hits,
)
from tests.unit.scheduler.speculation.test_ngram_replay import copied_text, prose

DEVICES = {
    "gpu": Device(fixed_ms=10.0, token_ms=0.04, draft_ms=1.5, draft_token_ms=0.005),
    "small_gpu": Device(3.0, 0.02, 0.8, 0.01, build_ms=2.5),
    "mac": Device(25.0, 0.5, 2.5, 0.05),
    "demo_cpu": Device(3.0, 0.27, 0.8, 0.05),
    "noisy": Device(3.0, 0.02, 0.8, 0.01, build_ms=2.5, noise=0.25),
}
METHODS: tuple[Method, ...] = ("ngram", "draft_model", "eagle")


def text_maker(
    method: Method, quality: float, count: int, copied: Callable[[int], ReplayedText]
) -> Callable[[int], ReplayedText]:
    """Return a function that makes texts: `copied` ones for n-grams, texts with hits for models."""
    if method == "ngram":
        return copied
    return lambda seed: text_with_hits(draw_draft_hits(quality, count, seed), prompt=100)


@pytest.mark.proof
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("device", DEVICES)
def test_drafts_rejected_nine_times_in_ten_cost_at_most_3_percent(
    device: str, method: Method, rows: int
) -> None:
    """The first texts of a server, of which a model guesses a tenth, lose at most 3 %."""
    make = text_maker(
        method, 0.1, 1_500, lambda seed: ReplayedText(prose(seed, 600), prose(-seed - 1, 600))
    )
    assert measure_speedup(DEVICES[device], make, rows, make_speculator(method))[0] >= 0.97


@pytest.mark.proof
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("device", ["gpu", "small_gpu", "mac", "demo_cpu"])
def test_adaptive_draft_count_gains_nine_tenths_of_best_fixed_count(
    device: str, method: Method, rows: int
) -> None:
    """The first texts of a server gain at least nine tenths of the best fixed number of drafts."""
    make = text_maker(method, 0.92, 1_000, copied_text)
    fixed = [
        measure_speedup(
            DEVICES[device], make, rows, make_speculator(method, drafts, adaptive=False)
        )[0]
        for drafts in (1, 2, 4, 8)
    ]
    ratio, _ = measure_speedup(DEVICES[device], make, rows, make_speculator(method, 8))
    assert ratio >= 0.9 * max(1.0, *fixed)


@pytest.mark.proof
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
@pytest.mark.parametrize("device", ["gpu", "mac", "small_gpu"])
def test_drafts_stop_on_text_they_miss_and_resume_on_predictable_text(
    device: str, method: Method, rows: int
) -> None:
    """Drafts end while most of them are rejected, resume while most are accepted, and end again."""
    hard, easy = 800, 2_000

    def make(seed: int) -> ReplayedText:
        parts = [draw_draft_hits(0.05, hard, seed), draw_draft_hits(0.97, easy, seed + 50)]
        return text_with_hits(
            [*parts[0], *parts[1], *draw_draft_hits(0.05, hard, seed + 90)], prompt=100
        )

    texts = [make(seed) for seed in range(rows)]
    run = make_replay(DEVICES[device], texts, make_speculator(method))
    done: list[tuple[int, int]] = []
    receive = run._receive

    def record_and_receive(plan: ReplayedPlan) -> None:
        receive(plan)
        done.append((min(text.tokens_done for text in texts), run.decisions[len(done)]))

    run._receive = record_and_receive  # type: ignore[method-assign]
    run.run()

    def share(begin: int, end: int) -> float:
        plans = [drafts for at, drafts in done if begin <= at < end]
        return sum(map(bool, plans)) / len(plans)

    assert share(hard // 2, hard) < 0.1
    assert share(hard + easy // 2, hard + easy) > 0.8
    assert share(hard + easy + hard // 2, 2 * hard + easy) < 0.1
