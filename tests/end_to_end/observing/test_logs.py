"""The log of a running Lockstep: every line one object, and files that `lockstep logs` reads."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running_lockstep import RunningLockstep, running_lockstep
from tests.support.captured_process import READY_DEADLINE_S
from tests.support.waiting import wait_until

REQUEST: dict[str, Any] = {"model": "lockstep-demo", "prompt": "one two", "max_tokens": 4}
NAMES = {("lockstep", None), ("gateway", None), ("scheduler", None), ("store", None), ("rank", 0)}


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningLockstep]:
    """One rank with JSON on standard output."""
    monkeypatch.setenv("LOCKSTEP_LOG_FORMAT", "json")
    with running_lockstep(tmp_path / "run") as started:
        yield started


def _parse(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_line_of_lockstep_is_one_object_from_start_through_failure_to_stop(
    running: RunningLockstep,
) -> None:
    """A log collector can parse all lines: those of roles, of MLX and of a dying interpreter."""
    assert running.post("/v1/completions", REQUEST)["choices"]
    rank = running.children()["rank-worker 0"]
    if sys.platform == "linux":
        with Path(f"/proc/{rank}/fd/1").open("w") as output:
            output.write("printed by a library\n")
    os.kill(rank, signal.SIGKILL)
    running.wait_for_line("ready again")
    assert running.post("/v1/completions", REQUEST)["choices"]
    running.process.send_signal(signal.SIGTERM)
    running.process.wait(30.0)
    wait_until(lambda: '"stopped"' in running.text)

    found = _parse(running.text)
    assert {(line["role"], line.get("rank")) for line in found} == NAMES
    assert len({line["host"] for line in found}) == 1
    joined = [line["epoch"] for line in found if line["event"] == "world_joined"]
    assert joined == [1, 2]
    printed = [(line["role"], line["rank"]) for line in found if line["event"] == "output"]
    assert printed == ([("rank", 0)] if sys.platform == "linux" else [])
    assert any("exited with signal 9" in line["event"] for line in found)


def test_log_files_hold_the_same_lines_and_are_read_by_the_logs_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With log.directory one file has the lines of all roles, and the command finds it."""
    monkeypatch.setenv("LOCKSTEP_LOG_DIRECTORY", str(tmp_path / "logs"))
    with contextlib.closing(RunningLockstep(tmp_path / "run")) as running:
        running.wait_until_listening()
        wait_until(lambda: running.readiness() == 200, READY_DEADLINE_S, poll_s=0.1)
        # On a busy machine a role's line may come to the file after the role has answered.
        file = tmp_path / "logs" / "lockstep.log"
        wait_until(lambda: "gateway_listening" in file.read_text(), READY_DEADLINE_S)
        # The variable is not set for the command: the running Lockstep says where its files are.
        monkeypatch.delenv("LOCKSTEP_LOG_DIRECTORY")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "services.commands.main", "logs"),
                *("--json", "--lines", "1000", "--port", str(running.port)),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        assert running.text == ""

    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["lockstep.log"]
    assert {(line["role"], line.get("rank")) for line in _parse(done.stdout)} == NAMES
