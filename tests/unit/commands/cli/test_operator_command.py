"""`lockstep restart` and `lockstep drain` where something is missing: a sentence and a code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.commands import main
from services.supervisor import restarting
from shared import limits
from shared.os import process_file

ROOT = Path(__file__).resolve().parents[4]
DEADLINE_S = 30.0


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder of its own."""
    monkeypatch.setenv("LOCKSTEP_PATHS_RUN_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def scheduler(run_dir: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A scheduler that nobody looks after, and that has no ranks."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.commands.main", "scheduler"], cwd=ROOT
    )
    try:
        until_s = time.monotonic() + DEADLINE_S
        while not (run_dir / "gateways.sock").exists():
            assert time.monotonic() < until_s
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("role", [["gateway"], ["scheduler"], ["store"], ["rank", "0"], ["ranks"]])
def test_nobody_is_there(
    capsys: pytest.CaptureFixture[str], run_dir: Path, role: list[str]
) -> None:
    """No such process here: exit 69 at once, with the role, the folder and the remedy."""
    code, out, err = _run(capsys, "restart", *role)

    assert code == limits.EXIT_UNAVAILABLE
    assert out == ""
    assert " ".join(role) in err
    assert str(run_dir) in err
    assert "lockstep up" in err
    assert err.count("\n") == 1


def test_a_stale_file_is_nobody(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    """A file of a process that was killed leads to no signal: its id may be somebody else's."""
    with subprocess.Popen(["sleep", "60"]) as stranger:
        (run_dir / "store.pid").write_text(f"{stranger.pid}\n")

        code, _, err = _run(capsys, "restart", "store")

        assert stranger.poll() is None
        stranger.kill()
    assert code == limits.EXIT_UNAVAILABLE
    assert "No store runs" in err


def test_nobody_starts_it_again(
    capsys: pytest.CaptureFixture[str],
    scheduler: "subprocess.Popen[bytes]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A role without a supervisor ends and does not come back: exit 69, and it is said why."""
    monkeypatch.setattr(restarting, "RETURN_DEADLINE_S", 1.0)

    code, out, err = _run(capsys, "restart", "scheduler")

    assert code == limits.EXIT_UNAVAILABLE
    assert f"scheduler: told process {scheduler.pid} to hand over" in out
    assert "was not started again within 1 s" in err
    assert "launchd or systemd" in err
    scheduler.wait(DEADLINE_S)


def test_a_process_that_does_not_end_is_killed(
    capsys: pytest.CaptureFixture[str],
    scheduler: "subprocess.Popen[bytes]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stopped process obeys no order: it is killed after its deadline, and that is said."""
    monkeypatch.setattr(restarting, "END_DEADLINE_S", 0.5)
    monkeypatch.setattr(restarting, "RETURN_DEADLINE_S", 0.5)
    scheduler.send_signal(signal.SIGSTOP)

    code, out, _ = _run(capsys, "restart", "scheduler")

    assert code == limits.EXIT_UNAVAILABLE
    assert "does not end; killing it" in out
    assert scheduler.wait(DEADLINE_S) == -signal.SIGKILL


SLOW_GATEWAY = """
import signal, sys, time
from pathlib import Path
from shared.os.process_file import ProcessFile

def end(*_):
    time.sleep(float(sys.argv[2]))
    file.release()
    sys.exit()

signal.signal(signal.SIGTERM, end)
file = ProcessFile(Path(sys.argv[1]), "gateway")
print("up", flush=True)
time.sleep(60)
"""
"""Drains for as many seconds as it is told."""


@pytest.mark.parametrize(
    ("drains_s", "limit_s", "is_cut"), [("0", "30", False), ("2", "0.5", True)]
)
def test_a_gateway_that_needed_all_its_time_has_cut_streams_off(
    capsys: pytest.CaptureFixture[str],
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    drains_s: str,
    limit_s: str,
    is_cut: bool,
) -> None:
    """Whether the streams could finish within scheduler.drain_s is said."""
    monkeypatch.setenv("LOCKSTEP_SCHEDULER_DRAIN_S", limit_s)
    monkeypatch.setattr(restarting, "RETURN_DEADLINE_S", 0.1)
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_GATEWAY, str(run_dir), drains_s],
        cwd=ROOT, stdout=subprocess.PIPE,
    ) as gateway:  # fmt: skip
        assert gateway.stdout is not None
        assert gateway.stdout.readline() == b"up\n"

        code, out, _ = _run(capsys, "restart", "gateway")

    assert code == limits.EXIT_UNAVAILABLE
    assert (f"requests that had not finished within {limit_s} s were cut off" in out) is is_cut


def test_drain_without_a_scheduler(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    """Nobody answers: exit 69 after the deadline, with the remedy."""
    code, out, err = _run(capsys, "drain", "--wait", "0")

    assert code == limits.EXIT_UNAVAILABLE
    assert out == ""
    assert "lockstep up" in err


def test_a_role_holds_its_file(scheduler: "subprocess.Popen[bytes]", run_dir: Path) -> None:
    """A role that was started by hand is found, until it has ended; then its file is gone."""
    assert [holder.pid for holder in process_file.find_processes(run_dir, "scheduler")] == [
        scheduler.pid
    ]

    scheduler.terminate()
    scheduler.wait(DEADLINE_S)

    assert not (run_dir / "scheduler.pid").exists()


def test_a_role_that_is_ended_while_it_starts(run_dir: Path) -> None:
    """It is found before it has sockets; told to end then, it ends in order and leaves no file."""
    with subprocess.Popen(
        [sys.executable, "-m", "services.commands.main", "scheduler"], cwd=ROOT
    ) as process:
        until_s = time.monotonic() + DEADLINE_S
        while not process_file.find_processes(run_dir, "scheduler"):
            assert time.monotonic() < until_s
        process.terminate()
        code = process.wait(DEADLINE_S)

    assert code == limits.EXIT_OK
    assert not (run_dir / "scheduler.pid").exists()


DEAF_LOADING = """
import signal, sys
from services.commands import main as cli
from services.gateway import main

# Whoever runs these tests in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)

def run(config):
    print("loads", flush=True)
    while True:
        try:
            while True:
                pass
        except BaseException:
            print("suppressed", flush=True)

main.run = run
sys.exit(cli.main(["gateway"]))
"""
"""Suppresses every exception while it loads, as a library may."""


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, limits.EXIT_OK), (signal.SIGINT, 130)]
)
def test_a_role_that_is_ended_while_a_library_suppresses_exceptions(
    run_dir: Path, number: signal.Signals, expected: int
) -> None:
    """No order to end is lost, whatever runs when it comes: `lockstep up` sends it once."""
    with subprocess.Popen(
        [sys.executable, "-c", DEAF_LOADING], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "loads\n"
            process.send_signal(number)
            code = process.wait(DEADLINE_S)
        finally:
            process.kill()
        said = process.stdout.read()

    assert code == expected
    assert said == ""
    assert not (run_dir / "gateway.pid").exists()


def test_a_role_runs_without_its_file(tmp_path: Path) -> None:
    """Where the file cannot be written (here: a folder has its name) the role says so and runs."""
    (tmp_path / "scheduler.pid").mkdir()
    environment = {**os.environ, "LOCKSTEP_PATHS_RUN_DIR": str(tmp_path)}

    with subprocess.Popen(
        [sys.executable, "-m", "services.commands.main", "scheduler"],
        cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        until_s = time.monotonic() + DEADLINE_S
        while not (tmp_path / "gateways.sock").exists():
            assert time.monotonic() < until_s
            time.sleep(0.02)
        time.sleep(0.2)
        process.terminate()
        _, err = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == limits.EXIT_OK
    assert "`lockstep restart` will not find this process" in err
