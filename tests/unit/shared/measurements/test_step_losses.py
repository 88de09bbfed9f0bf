"""The largest loss in measured steps, as a sentence with its numbers."""

from collections.abc import Sequence

import pytest

from shared.measurements.step_losses import (
    exchanges,
    find_losses,
    largest_loss,
    mean_seconds,
)
from shared.messages import MeasuredStep, PartTotal, StepProfile
from shared.messages.telemetry.step_profile import NO_LAYER, Part, Span, pack_spans, unpack_spans


def _profile(
    rank: int,
    seconds: dict[Part, float],
    collectives: list[float],
    *,
    send: Sequence[float] = (),
    receive: Sequence[float] = (),
    read_bytes: int = 0,
    bytes_per_s: float = 0.0,
) -> StepProfile:
    runs: dict[Part, Sequence[float]] = {
        "collective": collectives,
        "send": send,
        "receive": receive,
    }
    spans = [Span(part, 0, 0.0, one) for part, times in runs.items() for one in times]
    parts = [
        PartTotal(part=part, runs=1, seconds=one, bytes=read_bytes) for part, one in seconds.items()
    ]
    parts += [
        PartTotal(part=part, runs=len(times), seconds=sum(times))
        for part, times in runs.items()
        if times
    ]
    return StepProfile(
        rank=rank,
        step_id=1,
        began_s=0.0,
        seconds=sum(part.seconds for part in parts),
        kv_bytes=0,
        parts=parts,
        spans=pack_spans(spans),
        bytes_per_s=bytes_per_s,
    )


def _step(*profiles: StepProfile, kind: str = "decode", epoch: int = 1) -> MeasuredStep:
    return MeasuredStep(
        epoch=epoch,
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
    awaited = {rank: one.awaited_s for rank, one in exchanges(step.profiles).items()}
    assert awaited == pytest.approx({0: 0.0, 1: 0.0024, 2: 0.0})
    # The others only wait for rank 1, so their attention is not a loss of its own.
    assert not [one for one in find_losses([step]) if one.sentence.startswith("On rank")]


def test_parts_that_are_equally_late_are_both_named() -> None:
    """A delay before each collective is one of all parts that end in a collective."""
    fast: dict[Part, float] = {"attention": 0.001, "experts": 0.002, "head": 0.001}
    slow: dict[Part, float] = {"attention": 0.003, "experts": 0.0041, "head": 0.0012}
    step = _step(_profile(0, fast, [0.0021, 0.0022]), _profile(1, slow, [0.0001, 0.0001]))
    assert find_losses([step])[0].sentence == (
        "The others wait 4.10 ms a step for rank 1: experts take 4.10 ms there, 2.00 ms "
        "elsewhere; attention takes 3.00 ms there, 1.00 ms elsewhere."
    )


def test_wait_that_no_part_explains_is_named_without_a_part() -> None:
    """A part that takes 0.1 ms longer is not the reason for a wait of 4 ms."""
    step = _step(
        _profile(0, {"mlp": 0.001}, [0.0041]),
        _profile(1, {"mlp": 0.0011}, [0.0001]),
    )
    assert find_losses([step])[0].sentence == "The others wait 4.00 ms a step for rank 1."


def test_ranks_of_pipeline_wait_for_what_they_receive_and_for_the_last_layers() -> None:
    """Rank 0 receives from rank 1, and that from rank 2; then all wait for rank 0's result.

    The shorter of sending and receiving is the transfer.
    """
    layers: dict[Part, float] = {"mlp": 0.003}
    step = _step(
        _profile(0, layers, [0.0005], receive=[0.0071]),
        _profile(1, layers, [0.0037], receive=[0.0033], send=[0.0002]),
        _profile(2, layers, [0.007], send=[0.0001]),
    )
    found = exchanges(step.profiles)
    assert [one.transfer_s for one in found.values()] == pytest.approx([0.0007, 0.0008, 0.0006])
    assert [one.waiting_s for one in found.values()] == pytest.approx([0.0069, 0.0064, 0.0065])
    assert [one.awaited_s for one in found.values()] == pytest.approx([0.0065, 0.0069, 0.0032])
    assert find_losses([step])[0].sentence == (
        "The others wait 6.90 ms a step for rank 1, as the ranks of a pipeline compute in turn."
    )


def test_slow_part_is_named_with_the_time_that_reading_its_bytes_would_take() -> None:
    """On one rank there is no waiting, and the device's own speed is the measure."""
    profile = _profile(0, {"mlp": 0.004, "norms": 0.02}, [], read_bytes=1_000_000, bytes_per_s=1e9)
    (loss,) = find_losses([_step(profile)])
    assert loss.sentence == (
        "On rank 0 the MLP takes 4.00 ms a step, and reading the bytes that it needs would take "
        "1.00 ms."
    )


def test_collectives_are_named_when_no_rank_is_late() -> None:
    """The rank that waits least shows what the exchange itself takes."""
    step = _step(*(_profile(rank, {"mlp": 0.001}, [0.002, 0.002]) for rank in (0, 1)))
    assert find_losses([step])[0].sentence == (
        "2 exchanges between ranks take 4.00 ms a step even where no rank is late, 2000 us each."
    )


def test_means_are_over_all_steps_of_a_rank() -> None:
    """A part that runs in some steps only counts as 0 in the others."""
    steps = [_step(_profile(0, {"mlp": 0.002}, [])), _step(_profile(0, {"head": 0.001}, []))]
    assert mean_seconds(steps) == {0: pytest.approx({"mlp": 0.001, "head": 0.0005})}


def test_no_steps_have_no_losses() -> None:
    """Nothing is said about nothing."""
    assert find_losses([]) == []
    assert largest_loss([], 2) == ""


def test_sentence_is_about_whole_steps_of_most_frequent_kind_of_last_epoch() -> None:
    """Steps of other kinds and epochs, and those that a rank has not reported, do not count."""

    def step(late_s: float, kind: str = "decode", epoch: int = 2) -> MeasuredStep:
        waits = _profile(0, {"mlp": 0.001}, [late_s])
        return _step(waits, _profile(1, {"mlp": 0.001}, [0.0]), kind=kind, epoch=epoch)

    unreported = _step(_profile(0, {"mlp": 0.001}, [0.9]), epoch=3)
    steps = [*[step(0.007, epoch=1)] * 3, step(0.006, "prefill"), *[step(0.002)] * 2, unreported]
    assert largest_loss(steps, 2) == "The others wait 2.00 ms a step for rank 1."
    assert largest_loss([unreported], 2) == ""


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
