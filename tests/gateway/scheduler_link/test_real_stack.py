"""The gateway in the whole system: its own death, and a scheduler that is stopped and goes on."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.supervisor.status import service_queries
from shared.configuration.loading import load_config
from shared.messages import StatusReported
from tests.end_to_end.running_lockstep import RunningLockstep
from tests.gateway.concurrent_requests import until

_ABORTED_WITHIN_S = 2.0
_BUSY_S = 5.0
"""So much later a machine with other work to do may be with everything."""
_ENDLESS: dict[str, Any] = {
    "model": "lockstep-demo",
    "messages": [{"role": "user", "content": "Tell me everything."}],
    "temperature": 1.0,
    "max_tokens": 4_000,
    "logit_bias": {"2041": -100, "2042": -100, "2043": -100},
}
_SEEDED: dict[str, Any] = {**_ENDLESS, "seed": 7, "max_tokens": 800}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningLockstep]:
    """One rank, ready."""
    stack = RunningLockstep(tmp_path)
    try:
        stack.wait_until_ready()
        yield stack
    finally:
        stack.close()


def _status(stack: RunningLockstep) -> StatusReported:
    """Ask the scheduler itself; the gateway is not needed for it."""
    flags = {"gateway.port": stack.port, "paths.run_dir": str(stack.config_file.parent)}
    return service_queries.ask_status(load_config(flags=flags), 30.0)


def _is_idle(stack: RunningLockstep) -> bool:
    now = _status(stack)
    return (now.running, now.waiting) == (0, 0)


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


@pytest.mark.proof
def test_what_a_dead_gateway_owned_is_aborted(running: RunningLockstep) -> None:
    """F16: SIGKILL of a gateway with 16 streams; seconds later no sequence runs or waits."""
    for _ in range(16):
        _read(running, _ENDLESS, [])
    until(lambda: _status(running).running == 16, 30.0)
    os.kill(running.children()["gateway"], signal.SIGKILL)
    until(lambda: _is_idle(running), _ABORTED_WITHIN_S + _BUSY_S)


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_stopped_scheduler_is_a_pause(running: RunningLockstep) -> None:
    """F15: SIGSTOP for some seconds: /readyz says no, and streams go on where they were."""
    undisturbed: list[str] = []
    _read(running, _SEEDED, undisturbed).join(80.0)
    texts: list[str] = []
    threads = [_read(running, _SEEDED, texts) for _ in range(4)]
    until(lambda: _status(running).running == 4, 20.0)
    scheduler = running.children()["scheduler"]
    os.kill(scheduler, signal.SIGSTOP)
    try:
        until(lambda: running.readiness() == 503, 5.0)
    finally:
        os.kill(scheduler, signal.SIGCONT)
    until(lambda: running.readiness() == 200, 20.0)
    for thread in threads:
        thread.join(80.0)
    assert texts == undisturbed * 4
