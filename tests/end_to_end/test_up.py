"""`lockstep up` with real processes: start, killed and stopped processes, and shutdown."""

import contextlib
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
from shared.measurements.canary_names import PROMPT_PREFIX, SUM_PREFIX
from tests.end_to_end.running_lockstep import RunningLockstep, StreamReader, running_lockstep
from tests.support.captured_process import ROOT
from tests.support.process_table import wait_until_ended
from tests.support.waiting import wait_until

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


SHORT_DEADLINES = (
    "import os, sys; from services.commands import main; "
    "from services.supervisor.children import stuck_processes; "
    "stuck_processes.SILENCES = 0.5; os.environ['LOCKSTEP_SCHEDULER_SILENCE_S'] = '6'; "
    "sys.exit(main.main())"
)
"""`lockstep` with shorter deadlines for stopped and silent processes."""

END_DEADLINE_S = 3.0
EXTRA_S = 7.0
"""Added to deadlines, because other tests may keep both cores busy for seconds."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLockstep]:
    """Two ranks over the ring, shared by tests that leave them ready."""
    with running_lockstep(tmp_path_factory.mktemp("run"), 2) as running:
        yield running


@pytest.fixture
def single(tmp_path: Path) -> Iterator[RunningLockstep]:
    """One rank for a test that ends it. It may not be ready yet."""
    with contextlib.closing(RunningLockstep(tmp_path, 1)) as running:
        yield running


def _answer(running: RunningLockstep) -> str:
    body = running.post("/v1/chat/completions", QUESTION)
    text: str = body["choices"][0]["message"]["content"]
    return text


def test_curl_command_printed_by_lockstep_up_streams_answer(pair: RunningLockstep) -> None:
    """The command that `up` prints runs in a shell, and the answer is streamed."""
    start = next(n for n, line in enumerate(pair.lines) if line.startswith("curl "))
    command = "\n".join(pair.lines[start : start + 3])

    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
    )

    assert "data: [DONE]" in done.stdout
    assert "(2 ranks, ring)" in pair.text


def test_status_command_shows_both_ranks_as_text_and_json(pair: RunningLockstep) -> None:
    """`lockstep status` shows both ranks; `--json` prints the same report as an object."""
    flags = ["--config", str(pair.config_file)]

    table = _run_lockstep("status", *flags)
    assert table.returncode == 0, table.stderr
    report = json.loads(_run_lockstep("status", "--json", *flags).stdout)

    assert table.stdout.startswith("Lockstep is ready")
    assert report["world_size"] == 2
    assert [rank["state"] for rank in report["ranks"]] == ["ready", "ready"]
    assert {rank["pid"] for rank in report["ranks"]} <= set(pair.children().values())


def test_gateway_process_loads_tokenizer_library_and_rank_processes_do_not(
    pair: RunningLockstep,
) -> None:
    """Ranks do not load the tokenizer library, which would slow down each start by half a
    second."""
    if sys.platform != "linux":
        return  # Only Linux has a file that lists the libraries of a process.
    loaded = {
        role: "tokenizers" in Path(f"/proc/{pid}/maps").read_text()
        for role, pid in pair.children().items()
    }

    assert loaded["gateway"]
    assert not loaded["rank-worker 0"]
    assert not loaded["rank-worker 1"]


def test_stream_completes_and_next_answer_is_unchanged_after_rank_is_killed(
    pair: RunningLockstep,
) -> None:
    """After SIGKILL of a rank in the middle of a stream, the stream completes, and a later answer
    is the same as before."""
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
    flags = ["--json", "--config", str(pair.config_file)]
    for rank in json.loads(_run_lockstep("status", *flags).stdout)["ranks"]:
        # Sums are checked again; the long prompt is not, since it has passed within the hour.
        names = [one["name"] for one in rank["canary"]]
        assert any(name.startswith(SUM_PREFIX) for name in names)
        assert not any(name.startswith(PROMPT_PREFIX) for name in names)


@pytest.mark.proof
def test_rank_stopped_by_sigstop_in_stream_is_killed_and_replaced(pair: RunningLockstep) -> None:
    """After SIGSTOP of a rank, the supervisor kills it at a deadline and the text does not change.

    A stopped rank cannot leave its world, so no new epoch could begin before it ends.
    """
    expected = StreamReader(pair.stream("/v1/completions", LONG)).text()
    before = pair.children()
    reader = StreamReader(pair.stream("/v1/completions", LONG))

    os.kill(before["rank-worker 1"], signal.SIGSTOP)

    assert reader.text() == expected
    # Either the deadline of its step or that for stopped processes passes first.
    assert re.search("rank 1 (does not leave .*|has been stopped for .*): killing it", pair.text)
    wait_until_ended([before["rank-worker 0"], before["rank-worker 1"]], END_DEADLINE_S + EXTRA_S)
    pair.wait_for_line("ready again")
    # A rank that has served restarts without backoff, also the second time.
    ends = [line for line in pair.lines if "rank 1 exited with signal 9" in line]
    assert {line.rpartition(" in ")[2] for line in ends} <= {"0.0 s", "0.1 s"}


@pytest.mark.parametrize("role", ["scheduler", "gateway"])
def test_lockstep_gives_same_answer_after_scheduler_or_gateway_is_killed(
    pair: RunningLockstep, role: str
) -> None:
    """After SIGKILL of the scheduler or the gateway, a new process gives the same answer."""
    expected = _answer(pair)
    before = pair.children()

    os.kill(before[role], signal.SIGKILL)
    pair.wait_for_line(f"{role} exited with signal 9")

    assert _answer_with_retries(pair) == expected
    assert pair.children()[role] != before[role]


def _answer_with_retries(running: RunningLockstep, deadline_s: float = 90.0) -> str:
    """Ask until a request succeeds; return its answer."""

    def answer_or_none() -> str | None:
        try:
            return _answer(running)
        except (OSError, AssertionError):
            return None

    answer = wait_until(answer_or_none, deadline_s, poll_s=0.2, failure=lambda: running.text)
    assert answer is not None
    return answer


def test_second_lockstep_up_in_same_run_folder_exits_with_78(pair: RunningLockstep) -> None:
    """The error of the second `lockstep up` names the process that holds the run folder."""
    refused = _run_lockstep("up", "--config", str(pair.config_file))

    assert refused.returncode == limits.EXIT_CONFIG
    assert f"process {pair.process.pid}" in refused.stderr


def test_lockstep_up_exits_with_78_when_gateway_port_is_taken(tmp_path: Path) -> None:
    """The error names the taken port, and no process is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        refused = _run_lockstep("up", "--port", str(port), run_dir=tmp_path)

    assert refused.returncode == limits.EXIT_CONFIG
    assert str(port) in refused.stderr
    assert refused.stdout == ""


def test_ctrl_c_completes_running_stream_and_then_ends_all_processes(
    single: RunningLockstep,
) -> None:
    """One Ctrl-C while a stream runs: the stream completes, all processes end, and the exit code is
    0."""
    single.wait_until_ready()
    pids = list(single.children().values())
    stream = single.stream("/v1/completions", {**LONG, "max_tokens": 200})
    next(stream)

    single.interrupt()
    rest = list(stream)

    assert rest[-1] == "[DONE]"
    assert single.wait() == 0
    assert len(pids) == 4
    wait_until_ended(pids, END_DEADLINE_S + EXTRA_S)


def test_second_ctrl_c_ends_all_processes_without_waiting_for_stream(
    single: RunningLockstep,
) -> None:
    """A second Ctrl-C ends all processes without waiting for the stream; the exit code is 130."""
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
    wait_until_ended(pids, END_DEADLINE_S + EXTRA_S)
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_stream_completes_when_rank_is_killed_during_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is killed while Lockstep drains is replaced, and the stream completes."""
    # Long enough for a new rank to load the model and to recompute the stream.
    monkeypatch.setenv("LOCKSTEP_SCHEDULER_DRAIN_S", "90")
    with running_lockstep(tmp_path) as running:
        # Long enough for the stream to be open when the rank is killed.
        longer = {**LONG, "max_tokens": 1_500}
        expected = StreamReader(running.stream("/v1/completions", longer)).text()
        reader = StreamReader(running.stream("/v1/completions", longer))

        running.process.terminate()
        running.wait_for_line("gateway_draining")
        rank = running.children()["rank-worker 0"]
        assert not reader.is_done
        os.kill(rank, signal.SIGKILL)

        assert reader.text() == expected
        assert running.wait(120.0) == limits.EXIT_OK


@pytest.mark.proof
def test_lockstep_up_exits_with_69_when_stream_outlasts_drain_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` is not ready while it drains; it ends with EXIT_UNAVAILABLE if a stream does not
    complete."""
    monkeypatch.setenv("LOCKSTEP_SCHEDULER_DRAIN_S", "5")
    with running_lockstep(tmp_path) as running:
        reader = StreamReader(running.stream("/v1/completions", {**LONG, "max_tokens": 6_000}))

        running.process.terminate()
        running.wait_for_line("gateway_draining")
        assert running.readiness() == 503

        assert running.wait() == limits.EXIT_UNAVAILABLE
        assert reader.events[-1] != "[DONE]"
        assert "gateway could not finish" in running.text
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "blocks",
            "config.toml",
            "world.json",
        ]


@pytest.mark.proof
def test_services_stopped_by_sigstop_are_killed_and_replaced(tmp_path: Path) -> None:
    """After SIGSTOP of the scheduler, the store and the gateway, each is killed and started again.

    The supervisor notices the stopped scheduler because it does not answer; its successor continues
    the stream.
    """
    with running_lockstep(tmp_path, program=("-c", SHORT_DEADLINES)) as running:
        expected = StreamReader(running.stream("/v1/completions", LONG)).text()
        before = running.children()
        reader = StreamReader(running.stream("/v1/completions", LONG))

        os.kill(before["scheduler"], signal.SIGSTOP)
        running.wait_for_line("scheduler does not answer: killing it")
        assert reader.text() == expected

        for role in ("gateway", "cache-store"):
            os.kill(before[role], signal.SIGSTOP)
        # The order is not defined.
        kills = [running.wait_for_line("has been stopped for 6 s: killing it") for _ in range(2)]
        assert {line.split("|")[1].split()[0] for line in kills} == {"gateway", "store"}
        assert _answer_with_retries(running)

        # Kept open until the end: a request whose client leaves is aborted and need not drain.
        stream = running.stream("/v1/completions", {**LONG, "max_tokens": 6_000})
        next(stream)
        running.process.terminate()
        running.wait_for_line("stopping")
        running.process.terminate()
        assert running.wait() == 128 + signal.SIGTERM
        stream.close()  # type: ignore[attr-defined]


def test_ctrl_c_while_model_loads_ends_lockstep_at_once(single: RunningLockstep) -> None:
    """Ctrl-C does not wait until the model is loaded."""
    single.wait_for_line("Starting Lockstep")
    time.sleep(0.3)
    pids = list(single.children().values())

    single.interrupt()

    assert single.wait(30.0) == 0
    wait_until_ended(pids, END_DEADLINE_S + EXTRA_S)


def test_all_child_processes_end_when_supervisor_is_killed(single: RunningLockstep) -> None:
    """After SIGKILL of the supervisor, every child ends within three seconds."""
    single.wait_until_ready()
    pids = list(single.children().values())

    single.process.kill()

    assert len(pids) == 4
    wait_until_ended(pids, END_DEADLINE_S + EXTRA_S)


def test_lockstep_up_exits_with_78_when_model_cannot_be_split(tmp_path: Path) -> None:
    """Three ranks cannot share four KV heads: Lockstep prints the error and exits without
    restarts."""
    with contextlib.closing(RunningLockstep(tmp_path, 3)) as running:
        assert running.wait(90.0) == limits.EXIT_CONFIG
        assert "3" in running.text
        assert "stopping everything" in running.text
        assert not running.children()


def _run_lockstep(
    *arguments: str, run_dir: Path | None = None
) -> "subprocess.CompletedProcess[str]":
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
