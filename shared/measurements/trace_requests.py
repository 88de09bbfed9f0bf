"""Requests, HTTP requests and block transfers in a trace. Pure."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping

from shared.measurements.trace_writer import Facts, Lanes, Slice, TraceWriter
from shared.messages import (
    RecordedBlockTransfer,
    RecordedGateway,
    RecordedHttpRequest,
    RecordedRequest,
    TraceReported,
)
from shared.messages.telemetry.http_writes import unpack

_FIRST_LANE = {"restore": 100, "spill": 200}
_LANE_NAMES = {"restore": "restores", "spill": "spills"}
_WRITE_S = 1e-6
"""Shortest write that is drawn, so that arrows can end at it."""


@dataclasses.dataclass(slots=True)
class RequestSlices:
    """The slices of one request that are ends of arrows; None: it had no such phase."""

    queue: Slice
    prefill: Slice | None = None


Requests = Mapping[str, RequestSlices]
"""By the request's id."""


def add_requests(
    writer: TraceWriter,
    report: TraceReported,
    process: int,
    plans: Mapping[tuple[int, int], Slice],
    traces: Mapping[str, str],
) -> Requests:
    """Add all requests with their phases, and an arrow from each wait to the plan that ended it.

    Args:
        writer: gets the events.
        report: contains the requests.
        process: number of their process.
        plans: slices of plans, by epoch and step id.
        traces: clients' `traceparent` by the id of the response.
    """
    writer.add_process(process, "requests", process)
    lanes = Lanes(writer, process, 1, "requests")
    found: dict[str, RequestSlices] = {}
    for request in report.requests:
        ended_s = request.ended_at_s if request.ended_at_s is not None else report.now_s
        track = lanes.take(request.accepted_at_s, ended_s)
        facts: Facts = {
            "request": request.request_id,
            "prompt tokens": request.prompt_tokens,
            "completion tokens": request.completion_tokens,
            "end": request.end or "open",
        }
        if trace := traces.get(request.request_id.rpartition(":")[0]):
            facts["traceparent"] = trace
        name = f"request {request.request_id}"
        writer.add_slice(track, name, (request.accepted_at_s, ended_s), "request", facts)
        slices = {
            phase: writer.add_slice(track, phase, times_s, "request", facts)
            for phase, times_s in _phases(request, ended_s)
        }
        found[request.request_id] = RequestSlices(slices["queue"], slices.get("prefill"))
        plan = plans.get((request.first_epoch, request.first_step_id))
        writer.add_arrow("admission", slices["queue"], plan)
    return found


def add_block_transfers(
    writer: TraceWriter, report: TraceReported, first_process: int, requests: Requests
) -> None:
    """Add restores and spills of each rank, and an arrow from each restore to its prefill.

    Args:
        writer: gets the events.
        report: contains the block transfers.
        first_process: number of rank 0's process.
        requests: slices of requests.
    """
    by_track: defaultdict[tuple[int, str], list[RecordedBlockTransfer]] = defaultdict(list)
    for one in report.block_transfers:
        by_track[one.rank, one.kind].append(one)
    for (rank, kind), transfers in by_track.items():
        lanes = Lanes(writer, first_process + rank, _FIRST_LANE[kind], _LANE_NAMES[kind])
        for transfer in sorted(transfers, key=lambda one: one.ordered_at_s):
            times_s = transfer.ordered_at_s, transfer.ended_at_s
            facts: Facts = {
                "epoch": transfer.epoch,
                "blocks": transfer.blocks,
                "failed blocks": transfer.failed_blocks,
                "bytes": transfer.bytes,
                "disk ms": transfer.disk_ms,
            }
            if transfer.request_id:
                facts["request"] = transfer.request_id
            name = f"{kind} {transfer.blocks} blocks"
            drawn = writer.add_slice(lanes.take(*times_s), name, times_s, kind, facts)
            if (request := requests.get(transfer.request_id)) is not None:
                writer.add_arrow("restore", drawn, request.prefill or request.queue)


def add_http_requests(
    writer: TraceWriter,
    report: TraceReported,
    gateway: RecordedGateway,
    process: int,
    requests: Requests,
    plans: Mapping[tuple[int, int], Slice],
) -> None:
    """Add the HTTP requests of a gateway with their phases and writes.

    Arrows lead from each HTTP request to its requests at the scheduler, and from plans to writes.

    Args:
        writer: gets the events.
        report: the trace.
        gateway: the gateway.
        process: number of its process.
        requests: slices of requests.
        plans: slices of plans, by epoch and step id.
    """
    writer.add_process(process, f"HTTP requests of {gateway.name}", -1)
    lanes = Lanes(writer, process, 1, "HTTP requests")
    by_response: defaultdict[str, list[Slice]] = defaultdict(list)
    for name, request in requests.items():
        by_response[name.rpartition(":")[0]].append(request.queue)
    offset_s = gateway.clock_offset_s
    for one in gateway.http_requests:
        arrived_s = one.arrived_at_s - offset_s
        ended_s = report.now_s if one.ended_at_s is None else one.ended_at_s - offset_s
        writes = list(_writes(one, offset_s))
        ended_s = max(ended_s, writes[-1][0][1] if writes else arrived_s)
        if ended_s < report.since_s:
            continue
        track = lanes.take(arrived_s, ended_s)
        facts = _http_facts(one)
        whole = writer.add_slice(track, one.name, (arrived_s, ended_s), "http", facts)
        source = whole
        for phase, times_s in _http_phases(one):
            began_s, until_s = times_s[0] - offset_s, times_s[1] - offset_s
            if until_s > report.since_s:
                drawn = writer.add_slice(track, phase, (began_s, until_s), "http", facts)
                source = drawn if phase == "encode" else source
        for target in by_response[one.response_id] if one.response_id else ():
            writer.add_arrow("submission", source, target)
        for times_s, step, written in writes:
            if times_s[0] >= report.since_s:
                drawn = writer.add_slice(track, "write", times_s, "write", written)
                writer.add_arrow("tokens", plans.get(step), drawn)


def _phases(request: RecordedRequest, ended_s: float) -> Iterator[tuple[str, tuple[float, float]]]:
    started_s, first_s = request.started_at_s, request.first_token_at_s
    yield "queue", (request.accepted_at_s, started_s if started_s is not None else ended_s)
    if started_s is not None:
        yield "prefill", (started_s, first_s if first_s is not None else ended_s)
    if first_s is not None:
        yield "decode", (first_s, ended_s)


def _http_phases(one: RecordedHttpRequest) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the phases before the first byte, by the gateway's clock."""
    if one.read_at_s is None:
        return
    yield "read", (one.arrived_at_s, one.read_at_s)
    if one.submitted_at_s is None:
        return
    yield "encode", (one.read_at_s, one.submitted_at_s)
    if one.first_byte_at_s is not None:
        yield "wait", (one.submitted_at_s, one.first_byte_at_s)


def _http_facts(one: RecordedHttpRequest) -> Facts:
    facts: Facts = {"status": one.status or "open"}
    if one.response_id:
        facts["response"] = one.response_id
    if one.trace_parent:
        facts["traceparent"] = one.trace_parent
    return facts


def _writes(
    one: RecordedHttpRequest, offset_s: float
) -> Iterator[tuple[tuple[float, float], tuple[int, int], Facts]]:
    """Yield times, step and facts of each write; none overlaps the one before."""
    arrived_s = one.arrived_at_s - offset_s
    # They are rounded to microseconds, and must not reach into the phase before.
    until_s = arrived_s if one.first_byte_at_s is None else one.first_byte_at_s - offset_s
    for write in unpack(one.writes):
        began_s = max(until_s, write.at_s - offset_s)
        until_s = max(began_s + _WRITE_S, write.at_s - offset_s + write.seconds)
        facts: Facts = {"bytes": write.size_bytes, "tokens": write.tokens}
        if write.step_id:
            facts |= {"epoch": write.epoch, "step": write.step_id}
        yield (began_s, until_s), (write.epoch, write.step_id), facts
