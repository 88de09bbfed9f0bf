"""Export of spans by OTLP: a gateway process sends them to a real receiver."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.configuration.loading import config_from_tree
from shared.errors import ConfigError
from shared.messages import CachedPrefix, RequestAccepted, RequestFailed
from tests.gateway.running_gateway import RunningGateway, launch
from tests.gateway.scripted_scheduler import generated, reply_with
from tests.gateway.tracing.otlp_collector import OtlpCollector, attributes
from tests.support.ports import free_port
from tests.support.waiting import wait_until

_CHAT = "/v1/chat/completions"
_ROUTE = f"POST {_CHAT}"
_TRACE = "0af7651916cd43dd8448eb211c80319c"
_SPAN = "b7ad6b7169203331"
_FAST = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
_SERVER, _ERROR = 2, 2
"""Values of the enums SpanKind and StatusCode."""
_BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Confidential."}]}


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    """A collector for all tests of this module."""
    started = OtlpCollector()
    yield started
    started.close()


@pytest.fixture(scope="module")
def shared_gateway(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, collector: OtlpCollector
) -> Iterator[RunningGateway]:
    """A gateway that exports its spans there."""
    started = RunningGateway.start(
        model_folder,
        tmp_path_factory.mktemp("run"),
        environment=_FAST,
        otlp_endpoint=collector.url,
    )
    with started as running:
        yield running


def _spans_of(collector: OtlpCollector, response_id: str) -> dict[str, Any]:
    """Wait for the span of a response and its children; return them by name."""

    def found() -> Any:
        for span in collector.named(_ROUTE):
            if attributes(span).get("gen_ai.response.id") == response_id:
                return span
        return None

    wait_until(found, 10.0, failure=lambda: f"no span of {response_id}: {collector.spans}")
    root = found()
    children = [one for one in collector.spans if one.parent_span_id == root.span_id]
    return {"root": root, **{one.name: one for one in children}}


def test_span_of_request_has_conventional_attributes_children_and_the_clients_parent(
    gateway: RunningGateway, collector: OtlpCollector
) -> None:
    """The client's trace goes on; queue, prefill and decode follow each other within the span."""
    gateway.scheduler.reply = reply_with(
        [5, 6, 7], pause_s=0.02, cached=CachedPrefix(memory_tokens=2, stored_tokens=1)
    )
    headers = {"traceparent": f"00-{_TRACE}-{_SPAN}-01", "tracestate": "vendor=1"}
    before_ns = time.time_ns()
    status, answer, _ = gateway.post(
        _CHAT, {**_BODY, "max_tokens": 9, "temperature": 0.5, "top_k": 4}, headers
    )
    after_ns = time.time_ns()
    assert status == 200
    spans = _spans_of(collector, answer["id"])
    root = spans["root"]
    assert root.kind == _SERVER
    assert root.trace_id.hex() == _TRACE
    assert root.parent_span_id.hex() == _SPAN
    assert root.trace_state == "vendor=1"
    found = attributes(root)
    tokens = answer["usage"]["prompt_tokens"]
    expected = {
        "http.request.method": "POST",
        "http.route": _CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "lockstep",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 4,
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": tokens,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert {name: found.get(name) for name in expected} == expected
    assert spans.keys() == {"root", "queue", "prefill", "decode"}
    times = [(spans[one].start_time_unix_nano, spans[one].end_time_unix_nano)
             for one in ("queue", "prefill", "decode")]  # fmt: skip
    assert times[0][1] == times[1][0]
    assert times[1][1] == times[2][0]
    assert before_ns - 2e6 <= root.start_time_unix_nano <= times[0][0]
    # The gateway ends the span after the client has the answer: on a busy machine, well after.
    assert times[2][1] <= root.end_time_unix_nano <= after_ns + 1e9
    assert times[2][1] - times[2][0] >= 30e6
    assert collector.resource["service.name"] == "lockstep"


def test_span_without_client_trace_begins_a_new_one_and_has_no_texts(
    gateway: RunningGateway, collector: OtlpCollector
) -> None:
    """No attribute has the prompt, the answer or a stop string."""
    gateway.scheduler.reply = reply_with([5, 6])
    invalid = {"traceparent": f"00-{'0' * 32}-{_SPAN}-01"}
    _, answer, _ = gateway.post(_CHAT, {**_BODY, "stop": ["Mystery"]}, invalid)
    spans = _spans_of(collector, answer["id"])
    assert spans["root"].parent_span_id == b""
    assert int(spans["root"].trace_id.hex(), 16)
    assert spans["root"].trace_id.hex() != "0" * 32
    everything = str(attributes(spans["root"]))
    for text in ("Confidential", "Mystery", answer["choices"][0]["message"]["content"]):
        assert not text.strip() or text not in everything


def test_streamed_request_that_fails_midway_has_error_status(
    gateway: RunningGateway, collector: OtlpCollector
) -> None:
    """Its HTTP status is 200, because the stream had begun."""

    def fail(request: Any) -> Iterator[Any]:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        yield generated(request, 0, [5])
        yield 0.05
        yield RequestFailed(request_id=request.request_id, cause="failed", detail="It broke.")

    gateway.scheduler.reply = fail
    events = list(gateway.iter_events(_CHAT, _BODY))
    (response_id,) = {one["id"] for one in events if isinstance(one, dict) and "id" in one}
    root = _spans_of(collector, response_id)["root"]
    found = attributes(root)
    assert root.status.code == _ERROR
    assert found["error.type"] == "request_failed"
    assert found["http.response.status_code"] == 200
    assert found["gen_ai.response.finish_reasons"] == ["error"]


def test_refused_request_has_span_with_its_status_and_no_error(
    gateway: RunningGateway, collector: OtlpCollector
) -> None:
    """By the convention a client's mistake is no error of the server."""
    known = len(collector.named(_ROUTE))
    assert gateway.post(_CHAT, {"model": "tiny"})[0] == 400
    wait_until(lambda: len(collector.named(_ROUTE)) > known, 10.0)
    root = collector.named(_ROUTE)[-1]
    assert attributes(root)["http.response.status_code"] == 400
    assert root.status.code == 0


def test_request_of_unsampled_trace_and_probes_are_not_exported(
    gateway: RunningGateway, collector: OtlpCollector
) -> None:
    """A client that does not record its span gets none here."""
    gateway.scheduler.reply = reply_with([5])
    headers = {"traceparent": f"00-{'d' * 32}-{_SPAN}-00"}
    assert gateway.post(_CHAT, _BODY, headers)[0] == 200
    assert gateway.get("/health")[0] == 200
    _, answer, _ = gateway.post(_CHAT, _BODY)
    _spans_of(collector, answer["id"])
    assert not [one for one in collector.spans if one.trace_id.hex() == "d" * 32]
    assert {one.name for one in collector.spans if not one.name.startswith("POST")} <= {
        "queue",
        "prefill",
        "decode",
    }


def test_dead_collector_slows_no_request_and_is_logged_once(
    model_folder: Path, tmp_path: Path
) -> None:
    """Neither requests nor the end of the gateway wait for it."""
    started = RunningGateway.start(
        model_folder,
        tmp_path,
        environment=_FAST,
        otlp_endpoint=f"http://127.0.0.1:{free_port()}",
    )
    with started as running:
        running.scheduler.reply = reply_with([5])
        slowest_s = 0.0
        for _ in range(30):
            began_s = time.monotonic()
            assert running.post(_CHAT, _BODY)[0] == 200
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        assert slowest_s < 5.0
        time.sleep(2.5)
        began_s = time.monotonic()
        log = running.stop()
        assert time.monotonic() - began_s < 10.0
    assert log.count("otlp_export_failed") == 1
    assert "Traceback" not in log
    assert "opentelemetry" not in log


def test_collector_that_never_answers_does_not_hold_up_the_end(
    model_folder: Path, tmp_path: Path
) -> None:
    """A stopped collector accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = RunningGateway.start(
            model_folder,
            tmp_path,
            environment={"OTEL_BSP_SCHEDULE_DELAY": "50"},
            otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}",
        )
        with started as running:
            running.scheduler.reply = reply_with([5])
            assert running.post(_CHAT, _BODY)[0] == 200
            time.sleep(0.3)
            began_s = time.monotonic()
            running.stop()
            assert time.monotonic() - began_s < 8.0


def test_endpoint_without_opentelemetry_ends_with_remedy(
    model_folder: Path, tmp_path: Path
) -> None:
    """The exit code is that of a wrong setting."""
    settings = {
        "gateway": {"port": free_port(), "otlp_endpoint": "http://127.0.0.1:4318"},
        "model": {"path": str(model_folder)},
        "paths": {"run_dir": str(tmp_path)},
    }
    prelude = "import sys; sys.modules['opentelemetry.sdk.trace'] = None"
    with launch(settings, prelude=prelude) as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 78
    assert "install lockstep[otlp]" in errors.decode()
    assert "Traceback" not in errors.decode()


@pytest.mark.parametrize("endpoint", ["localhost:4318", "http://", "http://user:word@host", "x"])
def test_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    """Neither is one with a password, which belongs into OTEL_EXPORTER_OTLP_HEADERS."""
    with pytest.raises(ConfigError, match=r"gateway\.otlp_endpoint"):
        config_from_tree({"gateway": {"otlp_endpoint": endpoint}})


def test_trace_id_of_client_is_in_log_lines_of_its_request(
    model_folder: Path, tmp_path: Path
) -> None:
    """Without export too; a request without a trace has none."""
    begun = threading.Event()

    def fail(request: Any) -> Iterator[Any]:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        yield generated(request, 0, [5])
        # A failure before the stream has begun is no event of it.
        while not begun.is_set():
            yield 0.02
        yield RequestFailed(request_id=request.request_id, cause="failed", detail="It broke.")

    with RunningGateway.start(model_folder, tmp_path) as running:
        running.scheduler.reply = fail
        body = {**_BODY, "stream": True, "new_field": 1}
        for headers in ({"traceparent": f"00-{_TRACE}-{_SPAN}-01"}, {}):
            begun.clear()
            _send_stream(running, body, headers, begun)
        lines = running.stop().splitlines()
    failed = [line for line in lines if "stream_failed" in line]
    assert len(failed) == 2
    assert f"trace_id={_TRACE}" in failed[0]
    assert "trace_id" not in failed[1]
    assert any("field_ignored" in line and _TRACE in line for line in lines)


def _send_stream(
    running: RunningGateway,
    body: dict[str, Any],
    headers: dict[str, str],
    begun: threading.Event | None = None,
) -> None:
    """POST a request whose answer is a stream, and read it to the end.

    `begun` is set when the stream has begun.
    """
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    fields = {"Content-Type": "application/json", **headers}
    connection.request("POST", _CHAT, json.dumps(body), fields)
    response = connection.getresponse()
    if begun is not None:
        begun.set()
    response.read()
    connection.close()
