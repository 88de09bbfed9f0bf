"""`lockstep restart` and `lockstep drain` on a running Lockstep with an open stream."""

import contextlib
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
from tests.end_to_end.running_lockstep import RunningLockstep, StreamReader, running_lockstep

TOKENS = 1_500
"""Enough for a stream to be open still when a command in this process has returned."""
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
    """One rank; every test leaves it ready."""
    settings = "[scheduler]\nepochs_failed_max = 100\ndrain_s = 90.0\n"
    with running_lockstep(tmp_path_factory.mktemp("run"), settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def expected_text(running: RunningLockstep) -> str:
    """The text of the stream when no process is restarted."""
    return StreamReader(running.stream("/v1/completions", STREAM)).text()


def _run_command(running: RunningLockstep, *arguments: str) -> tuple[int, str]:
    """Run an operator's command in this process; return its exit code and its output.

    A new Python process would start more slowly than some streams end.
    """
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main.main([*arguments, "--config", str(running.config_file)])
    return code, output.getvalue()


def _pids_by_role(running: RunningLockstep) -> dict[str, int]:
    """Return the process ids by role, as the process files state them."""
    folder = running.config_file.parent
    names = ("scheduler", "store", "rank-0", "gateway")
    found = {name: process_file.find_processes(folder, name) for name in names}
    return {name: holders[0].pid for name, holders in found.items() if holders}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("role", "file"), [("scheduler", "scheduler"), ("rank 0", "rank-0"), ("store", "store")]
)
def test_text_of_open_stream_is_unchanged_when_operator_restarts_a_role(
    running: RunningLockstep, expected_text: str, role: str, file: str
) -> None:
    """When the command returns, a new process has taken over, and the text of the stream is
    unchanged."""
    before = _pids_by_role(running)
    reader = StreamReader(running.stream("/v1/completions", STREAM))

    assert len(reader.events) < TOKENS / 2
    code, output = _run_command(running, "restart", *role.split())

    assert code == 0, output
    after = _pids_by_role(running)
    assert after[file] != before[file]
    assert output.startswith(f"{role}: told process {before[file]} to ")
    assert output.endswith(f"{role}: taken over by process {after[file]}\n")
    assert after["gateway"] == before["gateway"]
    assert reader.text() == expected_text
    assert running.readiness() == 200
    assert running.post("/v1/completions", SHORT)["choices"]


def test_restart_ranks_command_returns_when_new_rank_is_ready(running: RunningLockstep) -> None:
    """`restart ranks` returns when a new rank process is ready."""
    before = _pids_by_role(running)

    code, output = _run_command(running, "restart", "ranks")

    assert code == 0, output
    assert _pids_by_role(running)["rank-0"] != before["rank-0"]
    assert running.readiness() == 200


@pytest.mark.proof
def test_restart_gateway_command_waits_until_open_stream_is_complete(
    running: RunningLockstep, expected_text: str
) -> None:
    """The old gateway ends its stream; then another gateway answers on the same port."""
    before = _pids_by_role(running)
    reader = StreamReader(running.stream("/v1/completions", STREAM))

    code, output = _run_command(running, "restart", "gateway")

    assert code == 0, output
    assert reader.is_done
    assert reader.text() == expected_text
    after = _pids_by_role(running)
    assert after["gateway"] != before["gateway"]
    assert {**after, "gateway": 0} == {**before, "gateway": 0}
    assert running.readiness() == 200
    assert running.post("/v1/completions", SHORT)["choices"]


@pytest.mark.proof
def test_drained_lockstep_answers_503_to_new_requests_until_drain_off(
    running: RunningLockstep, expected_text: str
) -> None:
    """While Lockstep drains, the open stream continues and new requests get a 503; `--off` ends
    this."""
    reader = StreamReader(running.stream("/v1/completions", STREAM))

    try:
        code, output = _run_command(running, "drain", "--wait", "0.1")
        assert code == limits.EXIT_UNAVAILABLE, output
        assert output.endswith("1 request is open (1 running, 0 waiting).\n")
        assert running.exchange("/v1/completions", SHORT, 30.0)[0] == 503
        assert running.readiness() == 503
        assert ", draining" in _run_command(running, "status")[1]

        code, output = _run_command(running, "drain")
        assert code == 0, output
        assert output.endswith("No request is open.\n")
        assert reader.text() == expected_text
        assert _run_command(running, "drain", "--wait", "0")[0] == 0
    finally:
        code, output = _run_command(running, "drain", "--off")
    assert code == 0, output
    running.wait_for_line("accepting new requests again")
    assert running.post("/v1/completions", SHORT)["choices"]
    assert running.readiness() == 200


@pytest.mark.proof
def test_lockstep_becomes_ready_when_scheduler_is_restarted_after_failed_epochs(
    tmp_path: Path,
) -> None:
    """After too many failed epochs Lockstep stays up, not ready, and prints the remedy once; the
    remedy helps."""
    (tmp_path / "own.toml").write_text("[scheduler]\nepochs_failed_max = 1\n")
    running = RunningLockstep(tmp_path, 1, "--config", str(tmp_path / "own.toml"))
    with contextlib.closing(running):
        # Killed before the world is ready: the loss of an idle world does not count as a failure.
        line = running.wait_for_line("epoch_begins")
        while "restart scheduler" not in line:
            os.kill(running.children()["rank-worker 0"], signal.SIGKILL)
            line = running.wait_for_line(
                "epoch_begins", "after repairing the cause run `lockstep restart scheduler`"
            )
        running.wait_until_listening()
        assert running.readiness() == 503
        assert "repair the cause" in _run_command(running, "status")[1]

        code, output = _run_command(running, "restart", "scheduler")

        assert code == 0, output
        assert running.readiness() == 200
        assert running.post("/v1/completions", SHORT)["choices"]
        assert running.text.count("no further start is tried") == 1
        running.interrupt()
        assert running.wait() == 0


def test_profile_shows_parts_of_real_steps_and_compares_them_with_earlier_ones(
    running: RunningLockstep, tmp_path: Path
) -> None:
    """Without a running request it sends one. The JSON of one run is compared with the next."""
    code, output = _run_command(running, "profile", "--steps", "6", "--json")
    assert code == 0, output
    earlier = tmp_path / "earlier.json"
    earlier.write_text(output[output.index("{") :])
    found = json.loads(earlier.read_text())
    assert [kind["kind"] for kind in found["kinds"]] == ["prefill", "decode"]
    assert sum(kind["steps"] for kind in found["kinds"]) == 6
    for kind in found["kinds"]:
        (rank,) = kind["ranks"]
        assert sum(part["share"] for part in rank["parts"]) == pytest.approx(1.0)
        names = {part["part"] for part in rank["parts"]}
        assert {"attention", "mlp", "head", "sampling", "kv_write"} <= names
        assert rank["bytes_per_s"] > 1e8
        assert rank["read_bytes_per_s"] > 0.0
        assert rank["primitives_per_layer"] > 10
        # A prefill computes more than it reads, and a single rank does not wait.
        assert bool(kind["losses"]) == (kind["kind"] == "decode")

    code, output = _run_command(
        running, "profile", "--steps", "6", "--request", "One.", "--compare", str(earlier)
    )
    assert code == 0, output
    assert "decode: " in output
    assert "ratio" in output
    assert "operations a layer" in output
    assert "reading the bytes that it needs would take" in output


def test_profile_with_wrong_file_to_compare_ends_with_sentence(
    running: RunningLockstep, tmp_path: Path
) -> None:
    """Nothing is measured then."""
    (tmp_path / "other.json").write_text('{"kinds": 3}')
    compare = ("--compare", str(tmp_path / "other.json"))
    code, output = _run_command(running, "profile", *compare)
    assert code == limits.EXIT_USAGE
    assert "is no result of `lockstep profile --json`" in output


def test_trace_has_the_steps_and_requests_of_the_recorded_seconds(
    running: RunningLockstep, tmp_path: Path
) -> None:
    """The file has the plans, host, device and parts of the rank, and the request that runs."""
    file = tmp_path / "trace.json"
    reader = StreamReader(running.stream("/v1/completions", STREAM))
    code, output = _run_command(running, "trace", "--seconds", "1", "-o", str(file))
    reader.text()
    assert code == 0, output
    assert str(file) in output
    events = json.loads(file.read_bytes())["traceEvents"]
    names = {one["args"]["name"] for one in events if one["ph"] == "M" and "name" in one["args"]}
    assert {"scheduler", "requests", "device", "parts of measured steps"} <= names
    assert {"attention", "mlp", "head"} <= {one["name"] for one in events if one["ph"] == "X"}
    steps = [one for one in events if one["ph"] == "X" and one["pid"] == 10 and one["tid"] == 2]
    assert len(steps) > 50
    assert any(one["name"] == "decode" and one["pid"] == 2 for one in events)


def test_trace_into_missing_folder_ends_with_sentence(running: RunningLockstep) -> None:
    """The path is named; there is no traceback."""
    arguments = ("--seconds", "0.1", "--no-parts", "-o", "/nowhere/trace.json")
    code, output = _run_command(running, "trace", *arguments)
    assert code == limits.EXIT_USAGE
    assert "cannot be written to /nowhere/trace.json: No such file or directory." in output
