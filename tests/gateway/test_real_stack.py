"""The gateway in the whole system: its own death, and a scheduler that is stopped and goes on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running_lockstep import RunningLockstep
from tests.printing import ROOT

_ABORTED_WITHIN_S = 2.0
_ENDLESS: dict[str, Any] = {
    "model": "lockstep-demo",
    "messages": [{"role": "user", "content": "Tell me everything."}],
    "temperature": 1.0,
    "max_tokens": 4_000,
    "logit_bias": {"2041": -100, "2042": -100, "2043": -100},
}
_SEEDED: dict[str, Any] = {**_ENDLESS, "seed": 7, "max_tokens": 400}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningLockstep]:
    """One rank, ready."""
    stack = RunningLockstep(tmp_path)
    try:
        stack.wait_until_ready()
        yield stack
    finally:
        stack.close()


def _status(stack: RunningLockstep) -> dict[str, Any]:
    """Ask the scheduler itself; the gateway is not needed for it."""
    command = [sys.executable, "-m", "services.cli", "status", "--json"]
    environment = {**os.environ, "LOCKSTEP_PATHS_RUN_DIR": str(stack.config_file.parent)}
    asked = subprocess.run(
        [*command, "--port", str(stack.port)],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    status: dict[str, Any] = json.loads(asked.stdout)
    return status


def _read(stack: RunningLockstep, body: dict[str, Any], texts: list[str]) -> threading.Thread:
    def read() -> None:
        text = ""
        for event in stack.stream("/v1/chat/completions", body):
            if event == "[DONE]":
                texts.append(text)
                return
            text += event["choices"][0]["delta"].get("content") or ""

    def until_it_breaks() -> None:
        with contextlib.suppress(OSError, ValueError):
            read()

    thread = threading.Thread(target=until_it_breaks, daemon=True)
    thread.start()
    return thread


def _until(holds: Any, timeout_s: float) -> float:
    begun_s = time.monotonic()
    while not holds():
        assert time.monotonic() - begun_s < timeout_s, "it never did"
        time.sleep(0.05)
    return time.monotonic() - begun_s


def test_what_a_dead_gateway_owned_is_aborted(running: RunningLockstep) -> None:
    """F16: SIGKILL of a gateway with 16 streams; 2 s later no sequence runs or waits."""
    for _ in range(16):
        _read(running, _ENDLESS, [])
    _until(lambda: _status(running)["running"] == 16, 30.0)
    os.kill(running.children()["gateway"], signal.SIGKILL)
    time.sleep(_ABORTED_WITHIN_S)
    status = _status(running)
    assert (status["running"], status["waiting"]) == (0, 0)


def test_a_stopped_scheduler_is_a_pause(running: RunningLockstep) -> None:
    """F15: SIGSTOP for some seconds: /readyz says no, and streams go on where they were."""
    undisturbed: list[str] = []
    _read(running, _SEEDED, undisturbed).join(60.0)
    texts: list[str] = []
    threads = [_read(running, _SEEDED, texts) for _ in range(4)]
    _until(lambda: _status(running)["running"] == 4, 20.0)
    scheduler = running.children()["scheduler"]
    os.kill(scheduler, signal.SIGSTOP)
    try:
        _until(lambda: running.readiness() == 503, 5.0)
    finally:
        os.kill(scheduler, signal.SIGCONT)
    _until(lambda: running.readiness() == 200, 20.0)
    for thread in threads:
        thread.join(60.0)
    assert texts == undisturbed * 4
