"""Trace of the last seconds, for Chrome's and Perfetto's viewers. Pure.

All times are put on the scheduler's clock. Arrows follow a request: from its HTTP request to its
wait, from there to the plan that admitted it, from each plan to the ranks' devices and to the
writes of its tokens, and from a restore to the prefill that uses it.
"""

from typing import Any

from shared.measurements.step_losses import largest_loss
from shared.measurements.trace_requests import add_block_transfers, add_http_requests, add_requests
from shared.measurements.trace_writer import Facts, Slice, TraceWriter
from shared.messages import RecordedStep, TraceReported
from shared.messages.telemetry.step_profile import unpack_spans
from shared.messages.telemetry.step_times import unpack

SECONDS_MAX = 60.0
"""Longest trace."""
REPORT_S = 1.5
"""Time until the ranks have reported all steps."""
MARGIN_S = 0.2
"""How much longer than the recording a trace is: the query takes a moment to arrive, and the steps
that an operator orders to be measured are the first ones."""

_SCHEDULER = 1
_REQUESTS = 2
_FIRST_RANK = 10
"""Number of rank 0's process in the trace."""
_FIRST_GATEWAY = 1_000
_HOST, _DEVICE, _PARTS = 1, 2, 3

Steps = dict[tuple[int, int], Slice]
"""The slices of plans, by epoch and step id."""


def build_trace(report: TraceReported) -> dict[str, Any]:
    """Return the trace as a JSON object.

    It has tracks for the HTTP requests of each gateway, for all requests of the scheduler, for the
    scheduler's plans, and for each rank: host, device, the parts of measured steps, restores and
    spills. If steps were measured, `otherData` has their largest loss.

    Args:
        report: what the scheduler knows of the last seconds.
    """
    writer = TraceWriter(report.since_s)
    plans = _add_plans(writer, report)
    for rank, host in enumerate(report.hosts):
        process = _FIRST_RANK + rank
        writer.add_process(process, f"rank {rank} on {host}", process)
        _add_rank(writer, report, rank, plans)
    _add_parts(writer, report)
    traces = {
        one.response_id: one.trace_parent for each in report.gateways for one in each.http_requests
    }
    requests = add_requests(writer, report, _REQUESTS, plans, traces)
    add_block_transfers(writer, report, _FIRST_RANK, requests)
    for number, gateway in enumerate(report.gateways):
        add_http_requests(writer, report, gateway, _FIRST_GATEWAY + number, requests, plans)
    loss = largest_loss(report.measured, len(report.hosts))
    # First, because Perfetto reads a file in pieces, and refuses one that cuts it in two.
    other = {"otherData": {"largest loss": loss}} if loss else {}
    return {**other, "traceEvents": writer.events()}


def _add_plans(writer: TraceWriter, report: TraceReported) -> Steps:
    """Add the plans on two tracks, because two may be in flight."""
    writer.add_process(_SCHEDULER, "scheduler", _SCHEDULER)
    writer.add_track((_SCHEDULER, 1), "plans")
    writer.add_track((_SCHEDULER, 2), "plans, sent ahead")
    found: Steps = {}
    for step in report.steps:
        until_s = step.finished_at_s if step.finished_at_s is not None else step.sent_at_s
        found[step.epoch, step.step_id] = writer.add_slice(
            (_SCHEDULER, 1 + step.step_id % 2),
            f"{step.kind} {step.step_id}",
            (step.sent_at_s, until_s),
            step.kind,
            _facts(step),
        )
    return found


def _add_rank(writer: TraceWriter, report: TraceReported, rank: int, plans: Steps) -> None:
    """Add host and device of a rank, and an arrow from each plan to the device."""
    process, handed_over_s, ended_s = _FIRST_RANK + rank, 0.0, 0.0
    host, device = (process, _HOST), (process, _DEVICE)
    writer.add_track(host, "host")
    writer.add_track(device, "device")
    for step in report.steps:
        if rank >= len(step.ranks) or not step.ranks[rank]:
            continue
        times = next(unpack(step.ranks[rank], step.sent_at_s))
        # The host does one after the other; the estimate of the offset may shift them a little.
        began_s = max(times.came_s, handed_over_s)
        built_s = max(began_s, times.built_s)
        handed_over_s = max(built_s, times.handed_over_s)
        device_s = max(times.began_s, ended_s)
        ended_s = max(device_s, times.ended_s)
        facts, name = _facts(step), step.step_id
        writer.add_slice(host, f"build {name}", (began_s, built_s), step.kind, facts)
        writer.add_slice(host, f"start {name}", (built_s, handed_over_s), step.kind, facts)
        computed = writer.add_slice(
            device, f"{step.kind} {name}", (device_s, ended_s), step.kind, facts
        )
        writer.add_arrow("step", plans[step.epoch, step.step_id], computed)


def _add_parts(writer: TraceWriter, report: TraceReported) -> None:
    ranks = {profile.rank for step in report.measured for profile in step.profiles}
    for rank in ranks:
        writer.add_track((_FIRST_RANK + rank, _PARTS), "parts of measured steps")
    for step in report.measured:
        for profile in step.profiles:
            # In whole microseconds, as its spans are: rounding makes none of them overlap.
            after_s = profile.began_s - report.clock_offsets_s[profile.rank] - report.since_s
            began_s = report.since_s + round(after_s, 6)
            spans = unpack_spans(profile.spans)
            # The outer ones first: they come in the order of their ends.
            for span in sorted(spans, key=lambda one: (one.began_s, -one.seconds)):
                times_s = began_s + span.began_s, began_s + span.began_s + span.seconds
                facts: Facts = {"layer": span.layer, "epoch": step.epoch, "step": step.step_id}
                track = _FIRST_RANK + profile.rank, _PARTS
                writer.add_slice(track, span.part, times_s, "part", facts)


def _facts(step: RecordedStep) -> Facts:
    return {
        "epoch": step.epoch,
        "step": step.step_id,
        "prompt tokens": step.prefill_tokens,
        "decodes": step.decodes,
        "drafts": step.drafts,
    }
