"""The gateway in the whole system: killed, and with a scheduler that is stopped and continued."""

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
from tests.support.waiting import wait_until

_ABORTED_WITHIN_S = 2.0
_BUSY_S = 5.0
"""Extra seconds for a busy test machine."""
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
    """A system with one rank, ready."""
    stack = RunningLockstep(tmp_path)
    try:
        stack.wait_until_ready()
        yield stack
    finally:
        stack.close()


def _status(stack: RunningLockstep) -> StatusReported:
    """Return the scheduler's status, without the gateway."""
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

    def read_until_error() -> None:
        with contextlib.suppress(OSError, ValueError):
            read()

    thread = threading.Thread(target=read_until_error, daemon=True)
    thread.start()
    return thread


@pytest.mark.proof
def test_scheduler_aborts_all_requests_of_killed_gateway(running: RunningLockstep) -> None:
    """F16: after SIGKILL of a gateway with 16 streams, no sequence runs or waits."""
    for _ in range(16):
        _read(running, _ENDLESS, [])
    wait_until(lambda: _status(running).running == 16, 30.0)
    os.kill(running.children()["gateway"], signal.SIGKILL)
    wait_until(lambda: _is_idle(running), _ABORTED_WITHIN_S + _BUSY_S)


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_streams_continue_with_same_tokens_after_scheduler_was_stopped_and_continued(
    running: RunningLockstep,
) -> None:
    """F15: during SIGSTOP /readyz is 503; afterwards the streams continue with the same tokens."""
    undisturbed: list[str] = []
    _read(running, _SEEDED, undisturbed).join(80.0)
    texts: list[str] = []
    threads = [_read(running, _SEEDED, texts) for _ in range(4)]
    wait_until(lambda: _status(running).running == 4, 20.0)
    scheduler = running.children()["scheduler"]
    os.kill(scheduler, signal.SIGSTOP)
    try:
        wait_until(lambda: running.readiness() == 503, 5.0)
    finally:
        os.kill(scheduler, signal.SIGCONT)
    wait_until(lambda: running.readiness() == 200, 20.0)
    for thread in threads:
        thread.join(80.0)
    assert texts == undisturbed * 4
