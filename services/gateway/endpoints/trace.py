"""Endpoint GET /v1/lockstep/trace. Owns its query and its limits."""

import asyncio

import orjson
from aiohttp import hdrs, web
from multidict import MultiMapping

from services.gateway.endpoints.completion_service import SERVICE
from services.gateway.http.errors import ApiError, invalid_field, unavailable
from shared.errors import UnavailableError
from shared.measurements.trace import SECONDS_MAX, build_trace
from shared.messages import TraceReported

SECONDS_DEFAULT = 10.0
RETRY_S = 2.0
FILE_NAME = "lockstep-trace.json"


async def trace(request: web.Request) -> web.Response:
    """Answer GET /v1/lockstep/trace: record for `seconds`, then send the trace as a download.

    Raises:
        ApiError: 400 for a wrong number of seconds; 429 while another trace is recorded; 503 when
            the scheduler does not answer.
    """
    tracing = request.app[SERVICE].tracing
    seconds = _seconds(request.query)
    if tracing.busy_s:
        raise ApiError(
            429,
            "Another trace is being recorded: send this request again when it is complete.",
            code="trace_in_progress",
            retry_after_s=tracing.busy_s,
        )
    try:
        report = await tracing.collect(seconds)
    except UnavailableError as error:
        raise unavailable(str(error), RETRY_S) from None
    # A long trace takes seconds to write, in which other requests have their turns.
    body = await asyncio.to_thread(_encode, report)
    return web.Response(
        body=body,
        content_type="application/json",
        headers={hdrs.CONTENT_DISPOSITION: f'attachment; filename="{FILE_NAME}"'},
    )


def _encode(report: TraceReported) -> bytes:
    return orjson.dumps(build_trace(report))


def _seconds(query: MultiMapping[str]) -> float:
    problem = f"it must be one number from 1 to {SECONDS_MAX:.0f}."
    if unknown := [name for name in query if name != "seconds"]:
        raise invalid_field(unknown[0][:100], "this query parameter is not known.")
    values = query.getall("seconds", [str(SECONDS_DEFAULT)])
    try:
        seconds = float(values[0])
    except ValueError:
        raise invalid_field("seconds", problem) from None
    if len(values) > 1 or not 1.0 <= seconds <= SECONDS_MAX:
        raise invalid_field("seconds", problem)
    return seconds
