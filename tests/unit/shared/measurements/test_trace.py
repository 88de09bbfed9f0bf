"""Traces in the format of Chrome's and Perfetto's viewers."""

import itertools
from collections import defaultdict
from typing import Any

import pytest

from services.scheduler.events import GatewayMessageReceived, RankMessageReceived
from shared.configuration.rank_settings import WorldConfig
from shared.configuration.settings import Config
from shared.measurements.trace import build_trace
from shared.messages import QueryTrace, StepsMeasured, TraceReported
from shared.messages.step_times import StepTimes, pack
from tests.unit.scheduler.support.in_memory_world import GATEWAY, InMemoryWorld

STEP_S = 0.005


def _world() -> InMemoryWorld:
    """Run three requests on two ranks, whose clocks are 100 s apart, and let them report."""
    world = InMemoryWorld(Config(world=WorldConfig(size=2, backend="ring")))
    world.boot()
    for name, tokens in (("a", 4), ("b", 7), ("c", 40)):
        world.submit(name, [1, 2, 3], tokens)
    for _ in range(12):
        world.step()
    records = world.core._telemetry.history.since((0, 0))[:10]
    for peer, rank in world.ranks.items():
        offset_s = 100.0 * rank.rank
        times = [
            StepTimes(*(one.sent_at_s + offset_s + part * STEP_S / 6 for part in range(1, 7)))
            for one in records
        ]
        for one, time in zip(records, times, strict=True):
            one.received_at_s[rank.rank] = time.reported_s - offset_s + STEP_S / 6
        report = StepsMeasured(
            epoch=1,
            rank=rank.rank,
            first_step_id=1,
            origin_s=times[0].came_s,
            times=pack(times, times[0].came_s),
            active_bytes=0,
            peak_bytes=0,
            cached_bytes=0,
        )
        world.tell(RankMessageReceived(peer, report))
    return world


def _report(world: InMemoryWorld, seconds: float) -> TraceReported:
    actions = world.core.handle(
        GatewayMessageReceived(GATEWAY, QueryTrace(seconds=seconds)), world.now_s
    )
    (report,) = (
        action.message  # type: ignore[union-attr]
        for action in actions
        if isinstance(getattr(action, "message", None), TraceReported)
    )
    assert isinstance(report, TraceReported)
    return report


def _slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def test_trace_has_every_step_on_scheduler_and_ranks_and_no_overlaps() -> None:
    """A viewer draws overlapping slices of one track wrongly."""
    events = build_trace(_report(_world(), 60.0))["traceEvents"]
    tracks = _slices(events)
    # Plans on two tracks, and host and device of two ranks.
    assert tracks.keys() == {(1, 1), (1, 2), (10, 1), (10, 2), (11, 1), (11, 2)}
    for rank in (10, 11):
        assert [one["args"]["step"] for one in tracks[rank, 2]] == list(range(1, 11))
    for slices in tracks.values():
        slices.sort(key=lambda one: one["ts"])
        for before, after in itertools.pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01


def test_ranks_with_different_clocks_lie_below_each_other() -> None:
    """Both ranks compute a step at the same time, though their clocks are 100 s apart."""
    tracks = _slices(build_trace(_report(_world(), 60.0))["traceEvents"])
    for first, second in zip(tracks[10, 2], tracks[11, 2], strict=True):
        assert first["ts"] == pytest.approx(second["ts"], abs=50.0)


def test_arrows_of_trace_begin_and_end_within_slices_or_requests() -> None:
    """Each arrow has both ends: from requests to plans, and from plans to devices."""
    events = build_trace(_report(_world(), 60.0))["traceEvents"]
    begins = {one["id"]: one for one in events if one["ph"] == "s"}
    ends = {one["id"]: one for one in events if one["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert {"request a", "request b", "request c", "1.3.0", "1.3.1"} <= begins.keys()
    tracks = _slices(events)
    for name, end in ends.items():
        slices = tracks[end["pid"], end["tid"]]
        assert any(
            one["ts"] - 0.01 <= end["ts"] <= one["ts"] + one["dur"] + 0.01 for one in slices
        ), name
        assert begins[name]["ts"] <= end["ts"] + 0.01


def test_requests_of_trace_have_their_phases() -> None:
    """Waiting, prefill and decode follow each other; an open request ends with the trace."""
    report = _report(_world(), 60.0)
    events = [one for one in build_trace(report)["traceEvents"] if one["ph"] in "be"]
    by_request: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_request[event["id"]].append(event)
    assert by_request.keys() == {"a", "b", "c"}
    for name, found in by_request.items():
        assert [one["name"] for one in found if one["ph"] == "b"] == [
            f"request {name}",
            "queue",
            "prefill",
            "decode",
        ]
        whole, *phases = (
            (begin["ts"], end["ts"]) for begin, end in zip(found[::2], found[1::2], strict=True)
        )
        assert phases[0][0] == whole[0]
        assert phases[-1][1] == whole[1]
        assert all(one[1] == other[0] for one, other in itertools.pairwise(phases))
    ends = {one.request_id: one.end for one in report.requests}
    assert ends == {"a": "length", "b": "length", "c": ""}


def test_trace_of_last_moment_has_only_what_happened_in_it() -> None:
    """Older steps and requests that ended before are left out."""
    world = _world()
    report = _report(world, 0.02)
    assert 0 < len(report.steps) <= 4
    assert {one.request_id for one in report.requests} == {"c"}
