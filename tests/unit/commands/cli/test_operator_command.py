"""Commands `lockstep restart` and `lockstep drain`, and the process files of roles."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.supervisor import restarting
from services.supervisor.status import running
from services.supervisor.status.service_queries import ask_status
from shared import limits
from shared.configuration.loading import config_from_tree, load_config
from shared.os import process_file
from tests.support.waiting import wait_until
from tests.unit.commands.command_lines import run

ROOT = Path(__file__).resolve().parents[4]
DEADLINE_S = 30.0


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty run folder that the settings name."""
    monkeypatch.setenv("LOCKSTEP_PATHS_RUN_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def scheduler(run_dir: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a scheduler without supervisor and without ranks."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services.commands.main", "scheduler"], cwd=ROOT
    )
    try:
        wait_until((run_dir / "gateways.sock").exists, DEADLINE_S)
        # It answers once it handles signals.
        ask_status(load_config(environment=os.environ), DEADLINE_S)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("role", [["gateway"], ["scheduler"], ["store"], ["rank", "0"], ["ranks"]])
def test_restart_exits_with_69_when_role_is_not_running(
    capsys: pytest.CaptureFixture[str], run_dir: Path, role: list[str]
) -> None:
    """The exit code is 69 at once; the error names role, run folder and remedy."""
    code, out, err = run(capsys, "restart", *role)

    assert code == limits.EXIT_UNAVAILABLE
    assert out == ""
    assert " ".join(role) in err
    assert str(run_dir) in err
    assert "lockstep up" in err
    assert err.count("\n") == 1


def test_restart_sends_no_signal_when_process_file_is_of_dead_process(
    capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    """No signal is sent for the file of a dead process, as its id may belong to another process."""
    with subprocess.Popen(["sleep", "60"]) as unrelated:
        (run_dir / "store.pid").write_text(f"{unrelated.pid}\n")

        code, _, err = run(capsys, "restart", "store")

        assert unrelated.poll() is None
        unrelated.kill()
    assert code == limits.EXIT_UNAVAILABLE
    assert "No store runs" in err


def test_restart_exits_with_69_when_no_supervisor_starts_role_again(
    capsys: pytest.CaptureFixture[str],
    scheduler: "subprocess.Popen[bytes]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The role ends and is not started again: the exit code is 69, and the error says why."""
    monkeypatch.setattr(restarting, "RETURN_DEADLINE_S", 1.0)

    code, out, err = run(capsys, "restart", "scheduler")

    assert code == limits.EXIT_UNAVAILABLE
    assert f"scheduler: told process {scheduler.pid} to hand over" in out
    assert "was not started again within 1 s" in err
    assert "launchd or systemd" in err
    scheduler.wait(DEADLINE_S)


def test_restart_kills_role_that_ignores_sigterm_until_its_deadline(
    capsys: pytest.CaptureFixture[str],
    scheduler: "subprocess.Popen[bytes]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that ignores SIGTERM is killed after its deadline, and the output says so."""
    monkeypatch.setattr(restarting, "END_DEADLINE_S", 0.5)
    monkeypatch.setattr(restarting, "RETURN_DEADLINE_S", 0.5)
    scheduler.send_signal(signal.SIGSTOP)

    code, out, _ = run(capsys, "restart", "scheduler")

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
"""Gateway that drains for the number of seconds in its second argument."""


@pytest.mark.parametrize(
    ("drains_s", "limit_s", "is_cut"), [("0", "30", False), ("2", "0.5", True)]
)
def test_restart_reports_whether_gateway_cut_streams(
    capsys: pytest.CaptureFixture[str],
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    drains_s: str,
    limit_s: str,
    is_cut: bool,
) -> None:
    """The output says whether all streams finished within scheduler.drain_s."""
    monkeypatch.setenv("LOCKSTEP_SCHEDULER_DRAIN_S", limit_s)
    monkeypatch.setattr(restarting, "RETURN_DEADLINE_S", 0.1)
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_GATEWAY, str(run_dir), drains_s],
        cwd=ROOT, stdout=subprocess.PIPE,
    ) as gateway:  # fmt: skip
        assert gateway.stdout is not None
        assert gateway.stdout.readline() == b"up\n"

        code, out, _ = run(capsys, "restart", "gateway")

    assert code == limits.EXIT_UNAVAILABLE
    assert (f"requests that had not finished within {limit_s} s were cut off" in out) is is_cut


def test_drain_command_exits_with_69_when_no_scheduler_answers(
    capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    """When no scheduler answers until the deadline, the exit code is 69 and the error has a
    remedy."""
    code, out, err = run(capsys, "drain", "--wait", "0")

    assert code == limits.EXIT_UNAVAILABLE
    assert out == ""
    assert "lockstep up" in err


def test_role_has_process_file_while_it_runs_and_removes_it_at_exit(
    scheduler: "subprocess.Popen[bytes]", run_dir: Path
) -> None:
    """A role that was started by hand is found while it runs; its file is removed at its end."""
    assert [holder.pid for holder in process_file.find_processes(run_dir, "scheduler")] == [
        scheduler.pid
    ]

    scheduler.terminate()
    scheduler.wait(DEADLINE_S)

    assert not (run_dir / "scheduler.pid").exists()


def test_role_removes_its_process_file_when_sigterm_arrives_during_start(run_dir: Path) -> None:
    """A role is found before it has sockets, and ends cleanly when SIGTERM arrives then."""
    with subprocess.Popen(
        [sys.executable, "-m", "services.commands.main", "scheduler"], cwd=ROOT
    ) as process:
        wait_until(
            lambda: process_file.find_processes(run_dir, "scheduler"), DEADLINE_S, poll_s=0.0
        )
        process.terminate()
        code = process.wait(DEADLINE_S)

    assert code == limits.EXIT_OK
    assert not (run_dir / "scheduler.pid").exists()


UNINTERRUPTIBLE_LOADING = """
import signal, sys
from services.commands import main as cli
from services.gateway import main

# Processes that a shell starts in the background inherit an ignored SIGINT.
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
"""Gateway whose loading suppresses every exception, as a library may."""


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, limits.EXIT_OK), (signal.SIGINT, 130)]
)
def test_sigterm_ends_role_while_a_library_suppresses_exceptions(
    run_dir: Path, number: signal.Signals, expected: int
) -> None:
    """A signal takes effect although loading code suppresses every exception."""
    with subprocess.Popen(
        [sys.executable, "-c", UNINTERRUPTIBLE_LOADING], cwd=ROOT, stdout=subprocess.PIPE, text=True
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


def test_role_warns_and_runs_when_process_file_cannot_be_written(tmp_path: Path) -> None:
    """A role that cannot write its file (here the path is a folder) warns and runs."""
    (tmp_path / "scheduler.pid").mkdir()
    environment = {**os.environ, "LOCKSTEP_PATHS_RUN_DIR": str(tmp_path)}

    with subprocess.Popen(
        [sys.executable, "-m", "services.commands.main", "scheduler"],
        cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        wait_until((tmp_path / "gateways.sock").exists, DEADLINE_S)
        time.sleep(0.2)
        process.terminate()
        _, err = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == limits.EXIT_OK
    assert "`lockstep restart` will not find this process" in err


def test_world_restart_without_supervisor_names_jobs_to_make_again(
    capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    """Roles that launchd or systemd keep as jobs of their own restart with new job files."""
    with contextlib.closing(_Held(run_dir, "scheduler")):
        code, _, err = run(capsys, "restart", "world", "--ranks", "2")

    assert code == limits.EXIT_UNAVAILABLE
    assert "No `lockstep up` keeps the roles" in err
    assert "lockstep systemd install" in err
    code, _, err = run(capsys, "restart", "world", "--ranks", "2")
    assert code == limits.EXIT_UNAVAILABLE
    assert f"No Lockstep runs with the run folder {run_dir}" in err


def test_world_restart_of_several_hosts_needs_the_file_with_all_settings(
    capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    """Flags for one host would leave the others with different settings."""
    scheduler = {"gateway_address": "tcp://10.0.0.1:1", "rank_address": "tcp://10.0.0.1:2"}
    paths = {"run_dir": str(run_dir)}
    config = config_from_tree({"paths": paths, "scheduler": scheduler})

    with contextlib.closing(_Held(run_dir, "supervisor", running.facts(config))):
        code, _, err = run(capsys, "restart", "world", "--ranks", "2")

    assert code == limits.EXIT_USAGE
    assert "give it with --inventory or --config" in err


@pytest.mark.parametrize("words", [["ranks", "--wait", "1"], ["world", "1"]])
def test_restart_with_option_of_another_role_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], run_dir: Path, words: list[str]
) -> None:
    """`--wait` is for the world, numbers are for ranks."""
    assert run_dir.is_dir()

    code, _, err = run(capsys, "restart", *words)

    assert code == limits.EXIT_USAGE
    assert err.count("\n") == 1


class _Held(process_file.ProcessFile):
    """A process file of this process."""

    def __init__(self, folder: Path, role: str, facts: str = "") -> None:
        super().__init__(folder, role, facts=facts)

    def close(self) -> None:
        """Delete it."""
        self.release()
