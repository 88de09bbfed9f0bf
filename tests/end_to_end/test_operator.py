"""`lockstep restart` and `lockstep drain` on a real Lockstep: what runs goes on."""

import contextlib
import http.client
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.commands import main
from shared import limits
from shared.os import process_file
from tests.end_to_end.running_lockstep import RunningLockstep, StreamReader

TOKENS = 1_500
"""A stream of so many is still open when a command in this process has done its work."""
STREAM: dict[str, Any] = {
    "model": "lockstep-demo",
    "prompt": "one two three",
    "temperature": 1.0,
    "seed": 7,
    "max_tokens": TOKENS,
}
SHORT = {**STREAM, "max_tokens": 4}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLockstep]:
    """One rank; every test leaves it serving."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "own.toml").write_text("[scheduler]\nepochs_failed_max = 100\ndrain_s = 90.0\n")
    running = RunningLockstep(folder, 1, "--config", str(folder / "own.toml"))
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def undisturbed(running: RunningLockstep) -> str:
    """What the stream says when nothing happens."""
    return StreamReader(running.stream("/v1/completions", STREAM)).text()


def _command(running: RunningLockstep, *arguments: str) -> tuple[int, str]:
    """Run an operator's command; return its exit code and what it prints.

    In this process: Python would need longer to start than some streams to end.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main.main([*arguments, "--config", str(running.config_file)])
    return code, said.getvalue()


def _pids(running: RunningLockstep) -> dict[str, int]:
    """Return the processes by the names of their files, once nobody starts."""
    folder = running.config_file.parent
    names = ("scheduler", "store", "rank-0", "gateway")
    found = {name: process_file.find_processes(folder, name) for name in names}
    return {name: holders[0].pid for name, holders in found.items() if holders}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("role", "file"), [("scheduler", "scheduler"), ("rank 0", "rank-0"), ("store", "store")]
)
def test_a_restart_in_mid_stream_loses_nothing(
    running: RunningLockstep, undisturbed: str, role: str, file: str
) -> None:
    """A new process has taken over when the command returns; the stream's text is the same."""
    before = _pids(running)
    reading = StreamReader(running.stream("/v1/completions", STREAM))

    assert len(reading.events) < TOKENS / 2
    code, said = _command(running, "restart", *role.split())

    assert code == 0, said
    after = _pids(running)
    assert after[file] != before[file]
    assert said.startswith(f"{role}: told process {before[file]} to ")
    assert said.endswith(f"{role}: taken over by process {after[file]}\n")
    assert after["gateway"] == before["gateway"]
    assert reading.text() == undisturbed
    assert running.readiness() == 200
    assert running.post("/v1/completions", SHORT)["choices"]


def test_all_ranks_can_be_restarted(running: RunningLockstep) -> None:
    """`restart ranks` with nothing to do: ready again with another process when it returns."""
    before = _pids(running)

    code, said = _command(running, "restart", "ranks")

    assert code == 0, said
    assert _pids(running)["rank-0"] != before["rank-0"]
    assert running.readiness() == 200


@pytest.mark.proof
def test_a_gateway_finishes_before_it_is_replaced(
    running: RunningLockstep, undisturbed: str
) -> None:
    """`restart gateway`: its stream ends whole, then another gateway answers on the same port."""
    before = _pids(running)
    reading = StreamReader(running.stream("/v1/completions", STREAM))

    code, said = _command(running, "restart", "gateway")

    assert code == 0, said
    assert reading.is_done
    assert reading.text() == undisturbed
    after = _pids(running)
    assert after["gateway"] != before["gateway"]
    assert {**after, "gateway": 0} == {**before, "gateway": 0}
    assert running.readiness() == 200
    assert running.post("/v1/completions", SHORT)["choices"]


def _status_of_post(running: RunningLockstep) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30.0)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(SHORT), headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.proof
def test_drain_and_take_it_back(running: RunningLockstep, undisturbed: str) -> None:
    """While it drains: the stream goes on, nothing new gets in; `--off` opens again."""
    reading = StreamReader(running.stream("/v1/completions", STREAM))

    try:
        code, said = _command(running, "drain", "--wait", "0.1")
        assert code == limits.EXIT_UNAVAILABLE, said
        assert said.endswith("1 request is open (1 running, 0 waiting).\n")
        assert _status_of_post(running) == 503
        assert running.readiness() == 503
        assert ", draining" in _command(running, "status")[1]

        code, said = _command(running, "drain")
        assert code == 0, said
        assert said.endswith("No request is open.\n")
        assert reading.text() == undisturbed
        assert _command(running, "drain", "--wait", "0")[0] == 0
    finally:
        code, said = _command(running, "drain", "--off")
    assert code == 0, said
    running.wait_for_line("accepting new requests again")
    assert running.post("/v1/completions", SHORT)["choices"]
    assert running.readiness() == 200


@pytest.mark.proof
def test_too_many_failed_epochs_wait_for_the_operator(tmp_path: Path) -> None:
    """It stays up and not ready, says once what to do, and doing that helps."""
    (tmp_path / "own.toml").write_text("[scheduler]\nepochs_failed_max = 1\n")
    running = RunningLockstep(tmp_path, 1, "--config", str(tmp_path / "own.toml"))
    try:
        # It ends before it is ready: a world that has nothing to do ends for no fault of its own.
        line = running.wait_for_line("epoch_begins")
        while "restart scheduler" not in line:
            os.kill(running.children()["rank-worker 0"], signal.SIGKILL)
            line = running.wait_for_line(
                "epoch_begins", "after repairing the cause run `lockstep restart scheduler`"
            )
        running.wait_until_listening()
        assert running.readiness() == 503
        assert "repair the cause" in _command(running, "status")[1]

        code, said = _command(running, "restart", "scheduler")

        assert code == 0, said
        assert running.readiness() == 200
        assert running.post("/v1/completions", SHORT)["choices"]
        assert running.text.count("no further start is tried") == 1
        running.interrupt()
        assert running.wait() == 0
    finally:
        running.close()
