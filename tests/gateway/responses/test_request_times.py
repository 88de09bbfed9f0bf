"""Histograms of request times against a client's stopwatch."""

import re
import time
from collections.abc import Iterator

import msgspec
import pytest

from shared.messages import CachedPrefix, RequestAccepted, RequestAdmitted, SubmitRequest
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import finished, generated

FIRST_S, NEXT_S = 0.4, 0.15
TOKENS = 4
LAG_S = 0.1
"""Longest way between gateway and client on a busy machine."""


def _reply(request: SubmitRequest) -> Iterator[msgspec.Struct | float]:
    yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
    yield RequestAdmitted(request_id=request.request_id, cached=CachedPrefix())
    for position in range(TOKENS):
        yield NEXT_S if position else FIRST_S
        yield generated(request, position, [10 + position])
    yield finished(request, TOKENS, "length")


def _read(gateway: RunningGateway, name: str) -> tuple[float, float]:
    """Return the sum and the count of a histogram."""
    page = gateway.get("/metrics")[1].decode()
    total, count = (
        float(re.findall(rf"^lockstep_{name}_seconds_{one} (\S+)$", page, re.MULTILINE)[0])
        for one in ("sum", "count")
    )
    return total, count


def test_histograms_of_request_times_agree_with_stopwatch_of_client(
    gateway: RunningGateway,
) -> None:
    """Time to first token, time between tokens and the whole time are those that a client sees."""
    names = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    before = {name: _read(gateway, name) for name in names}
    gateway.scheduler.reply = _reply
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": TOKENS, "stream": True}
    began_s = time.monotonic()
    seen_s = [
        time.monotonic() - began_s
        for event in gateway.iter_events("/v1/completions", body)
        if isinstance(event, dict) and event["choices"][0].get("text")
    ]
    after = {name: _read(gateway, name) for name in names}
    spent = {name: after[name][0] - before[name][0] for name in names}
    counts = [after[name][1] - before[name][1] for name in names]
    assert counts == [1, TOKENS - 1, 1]
    assert spent["time_to_first_token"] >= FIRST_S
    assert spent["time_to_first_token"] == pytest.approx(seen_s[0], abs=LAG_S)
    between_s = (TOKENS - 1) * NEXT_S
    assert spent["inter_token_latency"] == pytest.approx(between_s, abs=LAG_S)
    assert spent["inter_token_latency"] == pytest.approx(seen_s[-1] - seen_s[0], abs=LAG_S)
    assert spent["e2e_request_latency"] == pytest.approx(seen_s[-1], abs=LAG_S)
