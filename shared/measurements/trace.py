"""Trace of the last seconds in the format of Chrome's and Perfetto's viewers. Pure.

Source of the format: "Trace Event Format", by the Chromium project. Times are microseconds after
the beginning of the trace, by the scheduler's clock.
"""

from collections.abc import Iterator
from typing import Any

from shared.messages import RecordedRequest, RecordedStep, TraceReported
from shared.messages.step_profile import unpack_spans
from shared.messages.step_times import unpack

Event = dict[str, Any]

_SCHEDULER = 1
_REQUESTS = 2
_FIRST_RANK = 10
"""Number of rank 0's track among the processes."""
_HOST, _DEVICE, _PARTS = 1, 2, 3


def build_trace(report: TraceReported) -> dict[str, Any]:
    """Return the trace as a JSON object.

    It has tracks for the scheduler's plans, for each rank (host, device, and the parts of measured
    steps), and for each request. Arrows lead from a request to the plan that admitted it, and from
    a plan to its step on each rank.

    Args:
        report: what the scheduler knows of the last seconds.
    """
    events = [
        *_names(report),
        *(event for step in report.steps for event in _plan(report, step)),
        *_rank_events(report),
        *_part_events(report),
        *(event for request in report.requests for event in _request_events(report, request)),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(report: TraceReported) -> Iterator[Event]:
    tracks = [(_SCHEDULER, "scheduler", {1: "plans", 2: "plans, sent ahead"})]
    tracks.append((_REQUESTS, "requests", {}))
    for rank, host in enumerate(report.hosts):
        threads = {_HOST: "host", _DEVICE: "device", _PARTS: "parts of measured steps"}
        tracks.append((_FIRST_RANK + rank, f"rank {rank} on {host}", threads))
    for process, name, threads in tracks:
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        yield {
            "ph": "M",
            "pid": process,
            "name": "process_sort_index",
            "args": {"sort_index": process},
        }
        for thread, title in threads.items():
            yield {
                "ph": "M", "pid": process, "tid": thread, "name": "thread_name",
                "args": {"name": title},
            }  # fmt: skip


def _plan(report: TraceReported, step: RecordedStep) -> Iterator[Event]:
    """Yield a step on one of the scheduler's two tracks, because two plans may be in flight."""
    until_s = step.finished_at_s if step.finished_at_s is not None else step.sent_at_s
    yield _slice(report, step, (_SCHEDULER, _plan_track(step)), (step.sent_at_s, until_s))


def _plan_track(step: RecordedStep) -> int:
    return 1 + step.step_id % 2


def _slice(
    report: TraceReported,
    step: RecordedStep,
    track: tuple[int, int],
    times_s: tuple[float, float],
    name: str = "",
) -> Event:
    """Return a part of a step on a track, with the facts of the step."""
    return {
        "ph": "X",
        "pid": track[0],
        "tid": track[1],
        "name": name or f"{step.kind} {step.step_id}",
        "cat": step.kind,
        "ts": _us(report, times_s[0]),
        "dur": round(max(0.0, times_s[1] - times_s[0]) * 1e6, 3),
        "args": {
            "epoch": step.epoch,
            "step": step.step_id,
            "prompt tokens": step.prefill_tokens,
            "decodes": step.decodes,
            "drafts": step.drafts,
        },
    }


def _rank_events(report: TraceReported) -> Iterator[Event]:
    """Yield host and device of each rank, and an arrow from each plan to the device."""
    for rank in range(len(report.hosts)):
        process, handed_over_s, ended_s = _FIRST_RANK + rank, 0.0, 0.0
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
            host, device = (process, _HOST), (process, _DEVICE)
            yield _slice(report, step, host, (began_s, built_s), f"build {step.step_id}")
            yield _slice(report, step, host, (built_s, handed_over_s), f"start {step.step_id}")
            yield _slice(report, step, device, (device_s, ended_s))
            arrow = f"{step.epoch}.{step.step_id}.{rank}"
            yield from _arrow(
                arrow,
                (_SCHEDULER, _plan_track(step), _us(report, step.sent_at_s)),
                (*device, _us(report, device_s)),
            )


def _part_events(report: TraceReported) -> Iterator[Event]:
    for step in report.measured:
        for profile in step.profiles:
            offset_s = report.clock_offsets_s[profile.rank]
            for span in unpack_spans(profile.spans):
                yield {
                    "ph": "X",
                    "pid": _FIRST_RANK + profile.rank,
                    "tid": _PARTS,
                    "name": span.part,
                    "cat": "part",
                    "ts": _us(report, profile.began_s - offset_s + span.began_s),
                    "dur": round(span.seconds * 1e6, 3),
                    "args": {"layer": span.layer, "epoch": step.epoch, "step": step.step_id},
                }


def _request_events(report: TraceReported, request: RecordedRequest) -> Iterator[Event]:
    """Yield a request with its phases, and an arrow to the plan that admitted it."""
    ended_s = request.ended_at_s if request.ended_at_s is not None else report.now_s
    started_s = request.started_at_s
    first_s = request.first_token_at_s
    phases = [("queue", request.accepted_at_s, started_s if started_s is not None else ended_s)]
    if started_s is not None:
        phases.append(("prefill", started_s, first_s if first_s is not None else ended_s))
    if first_s is not None:
        phases.append(("decode", first_s, ended_s))
    args = {
        "prompt tokens": request.prompt_tokens,
        "completion tokens": request.completion_tokens,
        "end": request.end or "open",
    }
    name = f"request {request.request_id}"
    for label, from_s, until_s in [(name, request.accepted_at_s, ended_s), *phases]:
        common = {"pid": _REQUESTS, "tid": 1, "cat": "request", "id": request.request_id}
        yield {**common, "ph": "b", "name": label, "ts": _us(report, from_s), "args": args}
        yield {**common, "ph": "e", "name": label, "ts": _us(report, until_s)}
    steps = {(one.epoch, one.step_id): one for one in report.steps}
    step = steps.get((request.first_epoch, request.first_step_id))
    if step is not None and started_s is not None:
        sent_us = _us(report, step.sent_at_s)
        yield from _arrow(
            f"request {request.request_id}",
            (_REQUESTS, 1, _us(report, started_s)),
            (_SCHEDULER, _plan_track(step), sent_us),
        )


def _arrow(
    name: str, begin: tuple[int, int, float], end: tuple[int, int, float]
) -> Iterator[Event]:
    """Yield an arrow between two places, each (process, thread, microseconds)."""
    for phase, (process, thread, at_us) in (("s", begin), ("f", end)):
        event = {
            "ph": phase, "pid": process, "tid": thread, "ts": at_us, "id": name, "cat": "flow",
            "name": "step",
        }  # fmt: skip
        yield {**event, "bp": "e"} if phase == "f" else event


def _us(report: TraceReported, time_s: float) -> float:
    return round((time_s - report.since_s) * 1e6, 3)
