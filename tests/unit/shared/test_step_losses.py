"""The largest loss in measured steps, as a sentence with its numbers."""

import pytest

from shared.measurements.step_losses import (
    awaited_seconds,
    comparable_steps,
    find_losses,
    mean_seconds,
)
from shared.messages import MeasuredStep, PartTotal, StepProfile
from shared.messages.step_profile import NO_LAYER, Part, Span, pack_spans, unpack_spans


def _profile(
    rank: int,
    seconds: dict[Part, float],
    collectives: list[float],
    *,
    read_bytes: int = 0,
    bytes_per_s: float = 0.0,
) -> StepProfile:
    spans = [Span("collective", 0, 0.0, one) for one in collectives]
    parts = [
        PartTotal(part=part, runs=1, seconds=one, bytes=read_bytes) for part, one in seconds.items()
    ]
    sums = PartTotal(part="collective", runs=len(collectives), seconds=sum(collectives))
    return StepProfile(
        rank=rank,
        step_id=1,
        began_s=0.0,
        seconds=sum(seconds.values()) + sum(collectives),
        kv_bytes=0,
        parts=[*parts, sums] if collectives else parts,
        spans=pack_spans(spans),
        bytes_per_s=bytes_per_s,
    )


def _step(*profiles: StepProfile, kind: str = "decode") -> MeasuredStep:
    return MeasuredStep(
        epoch=1,
        step_id=1,
        kind=kind,  # type: ignore[arg-type]
        prefill_tokens=0,
        decodes=1,
        profiles=list(profiles),
    )


def test_late_rank_is_named_with_the_part_in_which_it_takes_longer() -> None:
    """Others wait in collectives for the rank that comes last; its slowest part says why."""
    fast: dict[Part, float] = {"attention": 0.001, "mlp": 0.002}
    slow: dict[Part, float] = {"attention": 0.0035, "mlp": 0.002}
    step = _step(
        _profile(0, fast, [0.0015, 0.0012]),
        _profile(1, slow, [0.0002, 0.0001]),
        _profile(2, fast, [0.0014, 0.0012]),
    )
    first = find_losses([step])[0]
    assert first.seconds == pytest.approx(0.0024)
    assert first.sentence == (
        "The others wait 2.40 ms a step for rank 1: attention takes 3.50 ms there, "
        "1.00 ms elsewhere."
    )
    assert awaited_seconds(step.profiles) == pytest.approx({1: 0.0024})


def test_slow_part_is_named_with_the_time_that_reading_its_bytes_would_take() -> None:
    """On one rank there is no waiting, and the device's own speed is the measure."""
    profile = _profile(0, {"mlp": 0.004, "norms": 0.02}, [], read_bytes=1_000_000, bytes_per_s=1e9)
    losses = find_losses([_step(profile)])
    assert [one.sentence for one in losses] == [
        "On rank 0 the MLP takes 4.00 ms a step, and reading its bytes would take 1.00 ms."
    ]


def test_collectives_are_named_when_no_rank_is_late() -> None:
    """The rank that waits least shows what the exchange itself takes."""
    step = _step(*(_profile(rank, {"mlp": 0.001}, [0.002, 0.002]) for rank in (0, 1)))
    assert find_losses([step])[0].sentence == (
        "2 collectives take 4.00 ms a step even where no rank is late, 2000 us each."
    )


def test_means_are_over_all_steps_of_a_rank() -> None:
    """A part that runs in some steps only counts as 0 in the others."""
    steps = [_step(_profile(0, {"mlp": 0.002}, [])), _step(_profile(0, {"head": 0.001}, []))]
    assert mean_seconds(steps) == {0: pytest.approx({"mlp": 0.001, "head": 0.0005})}


def test_only_whole_steps_of_the_most_frequent_kind_are_compared() -> None:
    """A prefill beside decodes, and a step that one rank has not reported, would mislead."""
    one, other = _profile(0, {"mlp": 0.1}, []), _profile(1, {"mlp": 0.1}, [])
    decodes = [_step(one, other), _step(one, other)]
    steps = [*decodes, _step(one), _step(one, other, kind="prefill")]
    assert comparable_steps(steps, 2) == decodes


def test_no_steps_have_no_losses() -> None:
    """Nothing is said about nothing."""
    assert find_losses([]) == []


def test_spans_are_unpacked_as_they_were_packed() -> None:
    """Part, layer and times survive; damaged bytes are refused."""
    spans = [Span("head", NO_LAYER, 0.25, 0.001), Span("kv_write", 93, 1e-6, 4_000.0)]
    packed = pack_spans(spans)
    assert [(one.part, one.layer) for one in unpack_spans(packed)] == [
        ("head", NO_LAYER),
        ("kv_write", 93),
    ]
    for found, sent in zip(unpack_spans(packed), spans, strict=True):
        assert found[2:] == pytest.approx(sent[2:], abs=1e-6)
    with pytest.raises(ValueError, match="11 bytes"):
        list(unpack_spans(packed[:-1]))
    with pytest.raises(ValueError, match="no part 200"):
        list(unpack_spans(b"\xc8" + packed[1:]))
