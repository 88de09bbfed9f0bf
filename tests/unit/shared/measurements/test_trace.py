"""Traces in the format of Chrome's and Perfetto's viewers."""

from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from services.scheduler.events import (
    Action,
    GatewayConnected,
    GatewayLost,
    GatewayMessageReceived,
    RankMessageReceived,
    SendToGateway,
    TimePassed,
)
from services.scheduler.telemetry.trace_queries import GATHER_S
from shared.configuration.rank_settings import WorldConfig
from shared.configuration.settings import Config
from shared.identifiers import PeerId
from shared.measurements.trace import build_trace
from shared.messages import (
    HttpRequestsReported,
    MeasuredStep,
    OrderTrace,
    PartTotal,
    QueryHttpRequests,
    QueryTrace,
    RecordedHttpRequest,
    StepProfile,
    StepsMeasured,
    TraceReported,
)
from shared.messages.telemetry import http_writes
from shared.messages.telemetry.http_writes import HttpWrite
from shared.messages.telemetry.step_profile import Span, pack_spans
from shared.messages.telemetry.step_times import StepTimes, pack
from tests.support.trace_checks import check_arrows, check_nesting
from tests.unit.scheduler.support.in_memory_world import GATEWAY, InMemoryWorld

STEP_S = 0.005
GATEWAY_OFFSET_S = -50.0


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


def _answers(actions: list[Action]) -> list[Any]:
    return [one.message for one in actions if isinstance(one, SendToGateway)]


def _report(
    world: InMemoryWorld, seconds: float, http_requests: Sequence[RecordedHttpRequest] = ()
) -> TraceReported:
    """Query a trace; the gateway's clock is 50 s behind and its way takes 1 ms."""
    query = GatewayMessageReceived(GATEWAY, QueryTrace(seconds=seconds))
    (asked,) = _answers(world.core.handle(query, world.now_s))
    assert asked == QueryHttpRequests(asked_at_s=world.now_s, seconds=0.0)
    answer = HttpRequestsReported(
        asked_at_s=asked.asked_at_s,
        came_at_s=world.now_s + GATEWAY_OFFSET_S + 0.001,
        answered_at_s=world.now_s + GATEWAY_OFFSET_S + 0.001,
        http_requests=list(http_requests),
    )
    actions = world.core.handle(GatewayMessageReceived(GATEWAY, answer), world.now_s + 0.002)
    (report,) = (one for one in _answers(actions) if isinstance(one, TraceReported))
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
    ranks = {(10, 1), (10, 2), (11, 1), (11, 2)}
    assert tracks.keys() - {(2, lane) for lane in range(1, 4)} == {(1, 1), (1, 2), *ranks}
    for rank in (10, 11):
        assert [one["args"]["step"] for one in tracks[rank, 2]] == list(range(1, 11))
    check_nesting(events)


def test_ranks_with_different_clocks_lie_below_each_other() -> None:
    """Both ranks compute a step at the same time, though their clocks are 100 s apart."""
    tracks = _slices(build_trace(_report(_world(), 60.0))["traceEvents"])
    for first, second in zip(tracks[10, 2], tracks[11, 2], strict=True):
        assert first["ts"] == pytest.approx(second["ts"], abs=50.0)


def test_arrows_of_trace_begin_and_end_within_slices() -> None:
    """Arrows lead from requests to plans, and from plans to the devices of both ranks."""
    arrows = check_arrows(build_trace(_report(_world(), 60.0))["traceEvents"])
    assert arrows["admission"] == 3
    assert arrows["step"] >= 2 * 9


def test_requests_of_trace_have_their_phases() -> None:
    """Waiting, prefill and decode follow each other; an open request ends with the trace."""
    report = _report(_world(), 60.0)
    events = build_trace(report)["traceEvents"]
    by_request: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "request":
            by_request[event["args"]["request"]].append(event)
    assert by_request.keys() == {"a", "b", "c"}
    for name, found in by_request.items():
        whole, *phases = found
        assert whole["name"] == f"request {name}"
        assert [one["name"] for one in phases] == ["queue", "prefill", "decode"]
        assert phases[0]["ts"] == whole["ts"]
        ends = [one["ts"] + one["dur"] for one in phases]
        assert ends[-1] == pytest.approx(whole["ts"] + whole["dur"], abs=0.01)
        assert ends[:-1] == pytest.approx([one["ts"] for one in phases[1:]], abs=0.01)
    ends_by_name = {one.request_id: one.end for one in report.requests}
    assert ends_by_name == {"a": "length", "b": "length", "c": ""}
    check_nesting(events)


def test_http_requests_of_trace_lie_on_scheduler_clock_and_lead_to_requests_and_writes() -> None:
    """Its arrival comes before the request's, though the gateway's clock is 50 s behind."""
    world = _world()
    known = _report(world, 60.0)
    (request,) = (one for one in known.requests if one.request_id == "b")
    (step,) = (one for one in known.steps if one.step_id == 3)
    arrived_s = request.accepted_at_s - 0.02
    assert step.finished_at_s is not None
    write = HttpWrite(step.finished_at_s + GATEWAY_OFFSET_S, 0.00002, 99, 1, 1, 3)
    traced = RecordedHttpRequest(
        name="POST /v1/completions",
        response_id="b",
        status=200,
        trace_parent=f"00-{'a' * 32}-{'b' * 16}-01",
        arrived_at_s=arrived_s + GATEWAY_OFFSET_S,
        read_at_s=arrived_s + 0.005 + GATEWAY_OFFSET_S,
        submitted_at_s=arrived_s + 0.02 + GATEWAY_OFFSET_S,
        first_byte_at_s=arrived_s + 0.03 + GATEWAY_OFFSET_S,
        ended_at_s=arrived_s + 0.5 + GATEWAY_OFFSET_S,
        writes=http_writes.pack(*write),
    )
    # The scheduler's id of the first choice of response b.
    requests = [
        msgspec.structs.replace(one, request_id=f"{one.request_id}:0") for one in known.requests
    ]
    report = msgspec.structs.replace(
        _report(world, 60.0, [traced]), requests=requests, since_s=arrived_s - 1.0
    )
    assert report.gateways[0].clock_offset_s == pytest.approx(GATEWAY_OFFSET_S, abs=1e-6)
    events = build_trace(report)["traceEvents"]
    check_nesting(events)
    arrows = check_arrows(events)
    assert arrows["submission"] == arrows["tokens"] == 1
    by_name = {one["name"]: one for one in events if one.get("cat") in ("http", "write")}
    assert by_name["POST /v1/completions"]["ts"] == pytest.approx(1e6, abs=2.0)
    assert by_name["read"]["dur"] == pytest.approx(5_000, abs=2.0)
    assert by_name["encode"]["dur"] == pytest.approx(15_000, abs=2.0)
    assert by_name["write"]["args"] == {"bytes": 99, "tokens": 1, "epoch": 1, "step": 3}
    (drawn,) = (one for one in events if one["name"] == "request b:0")
    assert drawn["args"]["traceparent"] == traced.trace_parent


def test_query_is_answered_without_gateway_that_does_not_report() -> None:
    """It waits a second for a gateway, and no longer for one that was lost."""
    world = _world()
    query = GatewayMessageReceived(GATEWAY, QueryTrace(seconds=1.0))
    assert not any(
        isinstance(one, TraceReported) for one in _answers(world.core.handle(query, world.now_s))
    )
    waiting = world.core.handle(TimePassed(), world.now_s + GATHER_S / 2)
    assert not any(isinstance(one, TraceReported) for one in _answers(waiting))
    late = _answers(world.core.handle(TimePassed(), world.now_s + GATHER_S))
    assert [one.gateways for one in late if isinstance(one, TraceReported)] == [[]]
    operator = PeerId(b"operator-1")
    world.core.handle(GatewayConnected(operator), world.now_s + 1.0)
    world.core.handle(GatewayMessageReceived(operator, QueryTrace(seconds=1.0)), world.now_s + 1.0)
    world.core.handle(GatewayLost(GATEWAY), world.now_s + 1.1)
    answers = _answers(world.core.handle(TimePassed(), world.now_s + 1.15))
    assert [one.gateways for one in answers if isinstance(one, TraceReported)] == [[]]


def test_order_of_trace_reaches_every_gateway_and_no_command() -> None:
    """Commands have no HTTP requests."""
    world = _world()
    operator = PeerId(b"operator-1")
    world.core.handle(GatewayConnected(operator), world.now_s)
    order = GatewayMessageReceived(operator, OrderTrace(seconds=3.0))
    sent = [
        (one.gateway, one.message)
        for one in world.core.handle(order, world.now_s)
        if isinstance(one, SendToGateway)
    ]
    assert sent == [(GATEWAY, QueryHttpRequests(asked_at_s=world.now_s, seconds=3.0))]


def test_trace_names_largest_loss_of_measured_steps() -> None:
    """Rank 0 waits 4 ms for rank 1; without measured steps nothing is said."""
    report = _report(_world(), 60.0)
    assert "otherData" not in build_trace(report)
    profiles = [
        StepProfile(
            rank=rank,
            step_id=1,
            began_s=1.0,
            seconds=waits_s,
            kv_bytes=0,
            parts=[PartTotal(part="collective", runs=1, seconds=waits_s)],
            spans=pack_spans([Span("collective", 0, 0.0, waits_s)]),
        )
        for rank, waits_s in enumerate((0.004, 0.0))
    ]
    step = MeasuredStep(
        epoch=1, step_id=1, kind="decode", prefill_tokens=0, decodes=1, profiles=profiles
    )
    trace = build_trace(msgspec.structs.replace(report, measured=[step]))
    said = {"largest loss": "The others wait 4.00 ms a step for rank 1."}
    assert trace["otherData"] == said
    # A viewer reads the file in pieces, and the rest should come last.
    assert list(trace) == ["otherData", "traceEvents"]


def test_parts_that_nest_without_gaps_are_all_drawn() -> None:
    """Inner parts begin or end with those around them, at times between two microseconds."""
    report = _report(_world(), 60.0)
    random = Random(7)
    cuts_s = sorted(random.uniform(0.0, 0.01) for _ in range(2_000))
    spans = []
    for began_s, inner_s, ended_s in zip(cuts_s[::3], cuts_s[1::3], cuts_s[2::3], strict=False):
        spans += [Span("kv_write", 0, began_s, inner_s - began_s)]
        spans += [Span("collective", 0, inner_s, ended_s - inner_s)]
        spans += [Span("attention", 0, began_s, ended_s - began_s)]
    profile = StepProfile(
        rank=1,
        step_id=1,
        began_s=report.since_s + random.uniform(100.0, 101.0),
        seconds=0.01,
        kv_bytes=0,
        parts=[],
        spans=pack_spans(spans),
    )
    step = MeasuredStep(
        epoch=1, step_id=1, kind="decode", prefill_tokens=0, decodes=1, profiles=[profile]
    )
    events = build_trace(msgspec.structs.replace(report, measured=[step]))["traceEvents"]
    check_nesting(events)
    assert sum(one.get("cat") == "part" for one in events) == len(spans)
    for event in events:
        assert isinstance(event.get("ts", 0), int)


def test_trace_of_last_moment_has_only_what_happened_in_it() -> None:
    """Older steps and requests that ended before are left out."""
    world = _world()
    report = _report(world, 0.02)
    assert 0 < len(report.steps) <= 4
    assert {one.request_id for one in report.requests} == {"c"}
