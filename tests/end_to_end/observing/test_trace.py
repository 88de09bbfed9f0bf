"""Traces of a running Lockstep with two ranks, an SSD cache and streams."""

import http.client
import itertools
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.commands import main
from tests.end_to_end.running_lockstep import (
    RunningLockstep,
    StreamReader,
    path_of_late_rank,
    running_lockstep,
)
from tests.support.trace_checks import check_arrows, check_form, check_nesting
from tests.support.waiting import wait_until

_TRACE = f"00-{'ab' * 16}-{'cd' * 8}-01"
_STREAM: dict[str, Any] = {
    "model": "lockstep-demo",
    "prompt": "one two three",
    "temperature": 1.0,
    "seed": 7,
    "max_tokens": 40,
}
_SETTINGS = (
    "[cache]\nresident_bytes_max = 1_500_000\nblock_tokens = 32\n[scheduler]\nsilence_s = 5.0\n"
)
_NO_END = {"2041": -100, "2042": -100, "2043": -100}
"""Biases of the tokens that end a completion."""
_PORT_SECONDS = "/v1/lockstep/trace?seconds=1"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLockstep]:
    """Two ranks with so little memory for blocks that prefixes are read from SSD again."""
    with running_lockstep(tmp_path_factory.mktemp("run"), 2, settings=_SETTINGS) as running:
        yield running


class _Stopwatch:
    """A streamed request, with the times at which its parts arrived."""

    def __init__(self, running: RunningLockstep) -> None:
        """Send it, and read it to the end."""
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
        headers = {"Content-Type": "application/json", "traceparent": _TRACE}
        self.sent_s = time.monotonic()
        connection.request(
            "POST", "/v1/completions", json.dumps({**_STREAM, "stream": True}), headers
        )
        response = connection.getresponse()
        self.arrived_s = []
        self.response_id = ""
        for line in response:
            if line.startswith(b"data: {"):
                self.arrived_s.append(time.monotonic())
                self.response_id = json.loads(line[6:])["id"]
        self.ended_s = time.monotonic()
        connection.close()


def _trace(running: RunningLockstep, file: Path, seconds: float, work: Any) -> tuple[Any, Any]:
    """Do some work while `lockstep trace` records, longer where the machine is busy.

    Returns:
        The result of the work, and the events of the trace.
    """
    for factor in (1, 3, 6):
        done: list[Any] = []
        thread = threading.Thread(target=lambda done=done: done.append(work()))
        timer = threading.Timer(0.3, thread.start)
        timer.start()
        arguments = ["trace", "--seconds", str(factor * seconds), "-o", str(file)]
        assert main.main([*arguments, "--config", str(running.config_file)]) == 0
        is_in_time = bool(done)
        thread.join(60)
        if is_in_time:
            break
    assert is_in_time
    return done[0], json.loads(file.read_bytes())["traceEvents"]


def test_trace_has_every_kind_of_event_and_arrow(running: RunningLockstep, tmp_path: Path) -> None:
    """Streams, restores and spills of two ranks; arrows from HTTP requests to writes of tokens."""

    def send(texts: Sequence[str]) -> None:
        for text in texts:
            running.post("/v1/completions", {**_STREAM, "prompt": text, "max_tokens": 2})

    names = (f"text {number}" for number in itertools.count())

    def new_texts(count: int) -> list[str]:
        new = itertools.islice(names, count)
        return [" ".join(f"Line {number} of {name}." for number in range(90)) for name in new]

    def work() -> _Stopwatch:
        # Blocks of the new texts are spilled, those of the first ones are restored.
        send([*new_texts(5), *first[:3]])
        return _Stopwatch(running)

    first = new_texts(7)
    send(first)
    stopwatch, events = _trace(running, tmp_path / "trace.json", 6.0, work)
    check_form(events)
    check_nesting(events)
    arrows = check_arrows(events)
    slices = [one for one in events if one["ph"] == "X"]
    kinds = {(one["cat"], one["pid"]) for one in slices}
    for rank in (10, 11):
        assert {("restore", rank), ("spill", rank), ("part", rank)} <= kinds
        assert any(one["name"] == "collective" and one["pid"] == rank for one in slices)
    kinds_of_work = {one["name"] for one in slices}
    assert {"queue", "prefill", "decode", "read", "encode", "wait", "write"} <= kinds_of_work
    assert {"submission", "admission", "step", "tokens", "restore"} <= arrows.keys()
    restores = [one["args"] for one in slices if one["cat"] == "restore"]
    assert any(one["blocks"] and one["bytes"] and one["disk ms"] for one in restores)
    (traced,) = (
        one
        for one in slices
        if one["args"].get("response") == stopwatch.response_id and one["name"].startswith("POST")
    )
    assert traced["args"]["traceparent"] == _TRACE
    (request,) = (one for one in slices if one["name"] == f"request {stopwatch.response_id}:0")
    assert request["args"]["traceparent"] == _TRACE


@pytest.mark.alone
def test_writes_of_trace_come_when_a_client_receives_them(
    running: RunningLockstep, tmp_path: Path
) -> None:
    """The client's stopwatch has the same intervals: one clock, scheduler's axis."""
    stopwatch, events = _trace(running, tmp_path / "trace.json", 3.0, lambda: _Stopwatch(running))
    (traced,) = (
        one
        for one in events
        if one["ph"] == "X"
        and one["args"].get("response") == stopwatch.response_id
        and one["name"].startswith("POST")
    )
    until_us = traced["ts"] + traced["dur"]
    writes = [
        one
        for one in events
        if one.get("cat") == "write"
        and one["tid"] == traced["tid"]
        and traced["ts"] <= one["ts"] <= until_us
    ]
    assert sum(one["args"]["tokens"] for one in writes) == _STREAM["max_tokens"]
    # Both count from the arrival of the request, which the client sees as its sending.
    after_s = [(one["ts"] - traced["ts"]) / 1e6 for one in writes if one["args"]["tokens"]]
    seen_s = [one - stopwatch.sent_s for one in stopwatch.arrived_s]
    assert after_s[0] == pytest.approx(seen_s[0], abs=0.1)
    assert after_s[-1] == pytest.approx(seen_s[-1], abs=0.1)
    assert traced["dur"] / 1e6 == pytest.approx(stopwatch.ended_s - stopwatch.sent_s, abs=0.1)


def test_gateway_sends_trace_as_download_and_records_one_at_a_time(
    running: RunningLockstep,
) -> None:
    """The second one is a 429 that says when; afterwards there is room again."""
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(_get(running, _PORT_SECONDS)))
    first.start()
    time.sleep(0.5)
    status, headers, body = _get(running, _PORT_SECONDS)
    assert status == 429
    assert int(headers["Retry-After"]) >= 1
    assert json.loads(body)["error"]["code"] == "trace_in_progress"
    running.post("/v1/completions", {**_STREAM, "max_tokens": 2})
    first.join(30)
    status, headers, body = answers[0]
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Disposition"] == 'attachment; filename="lockstep-trace.json"'
    events = json.loads(body)["traceEvents"]
    check_form(events)
    check_nesting(events)
    assert {"submission", "admission", "step", "tokens"} <= check_arrows(events).keys()


def test_trace_of_client_that_leaves_makes_room_for_the_next(running: RunningLockstep) -> None:
    """Its recording ends with its connection."""
    with socket.create_connection(("127.0.0.1", running.port)) as client:
        client.sendall(b"GET /v1/lockstep/trace?seconds=60 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.3)
        assert _get(running, _PORT_SECONDS)[0] == 429
    wait_until(lambda: _get(running, "/v1/lockstep/trace?seconds=1")[0] == 200, 20.0)


@pytest.mark.parametrize(
    "query", ["seconds=0.9", "seconds=61", "seconds=x", "seconds=nan", "seconds=1&seconds=2", "s=1"]
)
def test_trace_with_wrong_query_is_refused(running: RunningLockstep, query: str) -> None:
    """The sentence names the parameter."""
    status, _, body = _get(running, f"/v1/lockstep/trace?{query}")
    assert status == 400
    assert json.loads(body)["error"]["param"] in ("seconds", "s")


def test_trace_without_gateway_has_steps_and_ends_in_time(
    running: RunningLockstep, tmp_path: Path
) -> None:
    """A stopped gateway is left out after a second."""
    pid = running.children()["gateway"]
    os.kill(pid, signal.SIGSTOP)
    try:
        file = tmp_path / "trace.json"
        arguments = ["trace", "--seconds", "0.2", "--no-parts", "-o", str(file)]
        assert main.main([*arguments, "--config", str(running.config_file)]) == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    events = json.loads(file.read_bytes())["traceEvents"]
    titles = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert "scheduler" in titles
    assert not any("HTTP" in title for title in titles)


@pytest.mark.alone
def test_trace_names_rank_that_others_wait_for_and_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 ms in each attention of rank 1 stand in the file, on the console and in the download."""
    monkeypatch.setenv("PYTHONPATH", path_of_late_rank(tmp_path, "attention", 0.002))
    run_dir, file = tmp_path / "run", tmp_path / "trace.json"
    run_dir.mkdir(mode=0o700)
    settings = "[scheduler]\nprofile_every_steps = 10\n"
    body = {**_STREAM, "max_tokens": 2_000, "logit_bias": _NO_END}
    with running_lockstep(run_dir, 2, settings=settings) as running:
        stream = StreamReader(running.stream("/v1/completions", body))
        arguments = ["trace", "--seconds", "1", "-o", str(file)]
        assert main.main([*arguments, "--config", str(running.config_file)]) == 0
        _, _, downloaded = _get(running, _PORT_SECONDS)
        assert not stream.is_done
    said, sent = (
        json.loads(one)["otherData"]["largest loss"] for one in (file.read_bytes(), downloaded)
    )
    for one in (said, sent):
        assert re.match(r"The others wait \d+\.\d\d ms a step for rank 1: attention takes ", one)
    assert capsys.readouterr().out.endswith(f"{said}\n")


def _get(running: RunningLockstep, path: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=90)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()
