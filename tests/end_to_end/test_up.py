"""`lockstep up` with real processes: it serves, outlives each role, and leaves nobody behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared import limits
from tests.captured_process import ROOT
from tests.end_to_end.running_lockstep import RunningLockstep, StreamReader, wait_until_ended

QUESTION = {
    "model": "lockstep-demo",
    "messages": [{"role": "user", "content": "What is Lockstep?"}],
    "temperature": 0,
    "max_tokens": 60,
}
LONG: dict[str, Any] = {
    "model": "lockstep-demo",
    "prompt": "one two three",
    "temperature": 1.0,
    "seed": 5,
    "max_tokens": 300,
}


IMPATIENT = (
    "import sys; from services.commands import main; from services.supervisor import supervisor; "
    "from services.supervisor.children import stuck_processes; "
    "stuck_processes.SILENT_S, supervisor.STOPPED_S = 3.0, 6.0; sys.exit(main.main())"
)
"""`lockstep` that gives up stopped and silent processes sooner, so that a test can wait for it."""

GONE_S = 3.0
SLACK_S = 7.0
"""Two cores that other tests keep busy hold a process up for seconds."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLockstep]:
    """Two ranks over the ring, shared by the tests that leave it serving."""
    running = RunningLockstep(tmp_path_factory.mktemp("run"), 2)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.close()


@pytest.fixture
def single(tmp_path: Path) -> Iterator[RunningLockstep]:
    """One rank, for a test that ends it."""
    running = RunningLockstep(tmp_path, 1)
    try:
        yield running
    finally:
        running.close()


def _answer(running: RunningLockstep) -> str:
    body = running.post("/v1/chat/completions", QUESTION)
    text: str = body["choices"][0]["message"]["content"]
    return text


def test_the_printed_curl_line_works(pair: RunningLockstep) -> None:
    """What `up` prints can be pasted, and the answer streams."""
    start = next(n for n, line in enumerate(pair.lines) if line.startswith("curl "))
    command = "\n".join(pair.lines[start : start + 3])

    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
    )

    assert "data: [DONE]" in done.stdout
    assert "(2 ranks, ring)" in pair.text


def test_status_tells_what_runs(pair: RunningLockstep) -> None:
    """`lockstep status` names both ranks; --json gives the same as an object."""
    flags = ["--config", str(pair.config_file)]

    table = _lockstep("status", *flags)
    assert table.returncode == 0, table.stderr
    report = json.loads(_lockstep("status", "--json", *flags).stdout)

    assert table.stdout.startswith("Lockstep is ready")
    assert report["world_size"] == 2
    assert [rank["state"] for rank in report["ranks"]] == ["ready", "ready"]
    assert {rank["pid"] for rank in report["ranks"]} <= set(pair.children().values())


def test_ranks_load_no_tokenizer(pair: RunningLockstep) -> None:
    """Nothing of what would cost every start of a rank half a second; the gateway has it."""
    if sys.platform != "linux":
        return  # Only there a file tells what a process has loaded.
    loaded = {
        role: "tokenizers" in Path(f"/proc/{pid}/maps").read_text()
        for role, pid in pair.children().items()
    }

    assert loaded["gateway"]
    assert not loaded["rank-worker 0"]
    assert not loaded["rank-worker 1"]


def test_a_killed_rank_comes_back(pair: RunningLockstep) -> None:
    """SIGKILL of a rank in the middle of a stream: a pause for the client, then the rest of it."""
    expected = _answer(pair)
    before = pair.children()
    stream = pair.stream("/v1/completions", LONG)
    received = [next(stream) for _ in range(20)]

    os.kill(before["rank-worker 1"], signal.SIGKILL)
    received += list(stream)

    assert received[-1] == "[DONE]"
    assert received[-2]["choices"][0]["finish_reason"] in {"length", "stop"}
    pair.wait_for_line("ready again")
    assert _answer(pair) == expected
    after = pair.children()
    assert after.keys() == before.keys()
    assert after["rank-worker 1"] != before["rank-worker 1"]
    assert after["gateway"] == before["gateway"]


@pytest.mark.proof
def test_a_stopped_rank_is_replaced(pair: RunningLockstep) -> None:
    """SIGSTOP of a rank in mid-stream: it is killed at a deadline, and the text is the same.

    It can neither compute nor leave; without its end the world could not begin again.
    """
    expected = StreamReader(pair.stream("/v1/completions", LONG)).text()
    before = pair.children()
    reading = StreamReader(pair.stream("/v1/completions", LONG))

    os.kill(before["rank-worker 1"], signal.SIGSTOP)

    assert reading.text() == expected
    # Its step's deadline, or its own, whichever comes first.
    assert re.search("rank 1 (does not leave .*|has been stopped for .*): killing it", pair.text)
    assert wait_until_ended([before["rank-worker 0"], before["rank-worker 1"]], GONE_S + SLACK_S)
    pair.wait_for_line("ready again")
    # It had served, so it came back at once, the second time too.
    ends = [line for line in pair.lines if "rank 1 exited with signal 9" in line]
    assert {line.rpartition(" in ")[2] for line in ends} == {"0.1 s"}


@pytest.mark.parametrize("role", ["scheduler", "gateway"])
def test_a_killed_service_comes_back(pair: RunningLockstep, role: str) -> None:
    """SIGKILL of the scheduler or the gateway: it is started again and gives the same answer."""
    expected = _answer(pair)
    before = pair.children()

    os.kill(before[role], signal.SIGKILL)
    pair.wait_for_line(f"{role} exited with signal 9")

    assert _answer_soon(pair) == expected
    assert pair.children()[role] != before[role]


def _answer_soon(running: RunningLockstep, deadline_s: float = 90.0) -> str:
    until_s = time.monotonic() + deadline_s
    while True:
        try:
            return _answer(running)
        except (OSError, AssertionError):
            if time.monotonic() > until_s:
                raise
            time.sleep(0.2)


def test_a_second_one_is_refused(pair: RunningLockstep) -> None:
    """The same run folder: exit 78, and the sentence names the process that holds it."""
    refused = _lockstep("up", "--config", str(pair.config_file))

    assert refused.returncode == limits.EXIT_CONFIG
    assert f"process {pair.process.pid}" in refused.stderr


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Somebody else's port: exit 78 at once, with the port in the sentence."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        refused = _lockstep("up", "--port", str(port), run_dir=tmp_path)

    assert refused.returncode == limits.EXIT_CONFIG
    assert str(port) in refused.stderr
    assert refused.stdout == ""


def test_ctrl_c_ends_everything(single: RunningLockstep) -> None:
    """One Ctrl-C while a stream runs: it is drained, all processes end, exit code 0."""
    single.wait_until_ready()
    pids = list(single.children().values())
    stream = single.stream("/v1/completions", {**LONG, "max_tokens": 200})
    next(stream)

    single.interrupt()
    rest = list(stream)

    assert rest[-1] == "[DONE]"
    assert single.wait() == 0
    assert len(pids) == 4
    assert wait_until_ended(pids, GONE_S + SLACK_S)


def test_a_second_ctrl_c_ends_it_at_once(single: RunningLockstep) -> None:
    """Whoever does not want to wait for the drain presses Ctrl-C again: exit code 130."""
    single.wait_until_ready()
    pids = list(single.children().values())
    stream = single.stream("/v1/completions", {**LONG, "max_tokens": 6_000})
    next(stream)

    single.interrupt()
    single.wait_for_line("stopping")
    pressed_s = time.monotonic()
    single.interrupt()

    assert single.wait() == 130
    assert time.monotonic() - pressed_s < 15.0
    assert wait_until_ended(pids, GONE_S + SLACK_S)
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_what_drains_is_still_looked_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM while a stream runs, and then its rank is killed: the stream ends as it should."""
    # Within it a rank starts, loads the model and computes again what the stream has had.
    monkeypatch.setenv("LOCKSTEP_SCHEDULER_DRAIN_S", "90")
    running = RunningLockstep(tmp_path, 1)
    try:
        running.wait_until_ready()
        # So long that the stream is open when the rank is killed.
        longer = {**LONG, "max_tokens": 1_000}
        expected = StreamReader(running.stream("/v1/completions", longer)).text()
        reading = StreamReader(running.stream("/v1/completions", longer))

        running.process.terminate()
        running.wait_for_line("gateway_draining")
        rank = running.children()["rank-worker 0"]
        assert not reading.is_done
        os.kill(rank, signal.SIGKILL)

        assert reading.text() == expected
        assert running.wait(120.0) == limits.EXIT_OK
    finally:
        running.close()


@pytest.mark.proof
def test_a_stream_that_is_cut_off_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream longer than the time to drain: not ready at once, and the exit code is not 0."""
    monkeypatch.setenv("LOCKSTEP_SCHEDULER_DRAIN_S", "5")
    running = RunningLockstep(tmp_path, 1)
    try:
        running.wait_until_ready()
        reading = StreamReader(running.stream("/v1/completions", {**LONG, "max_tokens": 6_000}))

        running.process.terminate()
        running.wait_for_line("gateway_draining")
        assert running.readiness() == 503

        assert running.wait() == limits.EXIT_UNAVAILABLE
        assert reading.events[-1] != "[DONE]"
        assert "gateway could not finish" in running.text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks", "config.toml", "lock"]
    finally:
        running.close()


@pytest.mark.proof
def test_whoever_is_stopped_for_good_is_replaced(tmp_path: Path) -> None:
    """SIGSTOP of the scheduler, then of store and gateway: killed after a while, and started again.

    The scheduler is missed when it does not answer; the stream goes on with its successor.
    """
    running = RunningLockstep(tmp_path, 1, program=("-c", IMPATIENT))
    try:
        running.wait_until_ready()
        expected = StreamReader(running.stream("/v1/completions", LONG)).text()
        before = running.children()
        reading = StreamReader(running.stream("/v1/completions", LONG))

        os.kill(before["scheduler"], signal.SIGSTOP)
        running.wait_for_line("scheduler does not answer: killing it")
        assert reading.text() == expected

        for role in ("gateway", "cache-store"):
            os.kill(before[role], signal.SIGSTOP)
        # In whatever order.
        told = [running.wait_for_line("has been stopped for 6 s: killing it") for _ in range(2)]
        assert {line.split("|")[1].split()[0] for line in told} == {"gateway", "store"}
        assert _answer_soon(running)

        # Held until the end: a request that nobody reads is aborted, and then nothing drains.
        stream = running.stream("/v1/completions", {**LONG, "max_tokens": 6_000})
        next(stream)
        running.process.terminate()
        running.wait_for_line("stopping")
        running.process.terminate()
        assert running.wait() == 128 + signal.SIGTERM
        stream.close()  # type: ignore[attr-defined]
    finally:
        running.close()


def test_ctrl_c_while_loading(single: RunningLockstep) -> None:
    """Ctrl-C does not wait for a model to load."""
    single.wait_for_line("Starting Lockstep")
    time.sleep(0.3)
    pids = list(single.children().values())

    single.interrupt()

    assert single.wait(30.0) == 0
    assert wait_until_ended(pids, GONE_S + SLACK_S)


def test_nobody_outlives_a_killed_supervisor(single: RunningLockstep) -> None:
    """SIGKILL of the supervisor: every child is gone within three seconds."""
    single.wait_until_ready()
    pids = list(single.children().values())

    single.process.kill()

    assert len(pids) == 4
    assert wait_until_ended(pids, GONE_S + SLACK_S)


def test_what_can_never_run_stops_everything(tmp_path: Path) -> None:
    """Three ranks cannot share four KV heads: no endless restarts, but a sentence and exit 78."""
    running = RunningLockstep(tmp_path, 3)
    try:
        assert running.wait(90.0) == limits.EXIT_CONFIG
        assert "3" in running.text
        assert "stopping everything" in running.text
        assert not running.children()
    finally:
        running.close()


def _lockstep(*arguments: str, run_dir: Path | None = None) -> "subprocess.CompletedProcess[str]":
    extra = {"LOCKSTEP_PATHS_RUN_DIR": str(run_dir)} if run_dir else {}
    return subprocess.run(
        [sys.executable, "-m", "services.commands.main", *arguments],
        cwd=ROOT,
        env={**os.environ, **extra},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
