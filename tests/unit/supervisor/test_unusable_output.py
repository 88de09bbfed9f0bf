"""`lockstep up` whose output cannot be written, or whose run folder is on a full disk."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import limits
from tests.support.ports import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 90.0
"""On a busy machine the start of a few processes can take that long."""

UP = [sys.executable, "-m", "services.commands.main", "up"]


@pytest.fixture
def port() -> int:
    """A free port."""
    return free_port()


@pytest.fixture
def environment(tmp_path: Path, port: int) -> dict[str, str]:
    """The environment of a Lockstep with its own run folder."""
    return {
        **os.environ,
        "LOCKSTEP_PATHS_RUN_DIR": str(tmp_path / "run"),
        "LOCKSTEP_GATEWAY_PORT": str(port),
        "LOCKSTEP_CACHE_SSD": "false",
    }


@contextlib.contextmanager
def _full_pipe() -> Iterator[int]:
    """Yield the write end of a full pipe that no process reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4_096)
    # Writes must block, as they do on any pipe.
    os.set_blocking(writing, True)
    assert not fcntl.fcntl(writing, fcntl.F_GETFL) & os.O_NONBLOCK
    try:
        yield writing
    finally:
        os.close(writing)
        os.close(reading)


def _exit_code_after_serving(process: "subprocess.Popen[bytes]", port: int) -> int:
    """Wait until the gateway listens, send SIGTERM, and return the exit code."""

    def is_listening() -> bool:
        assert process.poll() is None
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return True
        return False

    try:
        wait_until(is_listening, DEADLINE_S, poll_s=0.05)
        process.send_signal(signal.SIGTERM)
        return process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()


def test_lockstep_up_serves_and_ends_when_its_output_is_not_read(
    environment: dict[str, str], port: int
) -> None:
    """A full pipe, as of a pager or a stopped terminal, does not block start, service or end."""
    with _full_pipe() as writing:
        process = subprocess.Popen(
            UP, cwd=ROOT, env=environment, stdout=writing, stderr=subprocess.DEVNULL
        )
        assert _exit_code_after_serving(process, port) == limits.EXIT_OK


def test_lockstep_up_serves_when_standard_output_is_closed(
    environment: dict[str, str], port: int
) -> None:
    """With `>&-`, nothing but the output is missing."""
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *UP]
    process = subprocess.Popen(shell, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)

    assert _exit_code_after_serving(process, port) == limits.EXIT_OK


def test_lockstep_up_exits_with_78_when_run_folder_is_on_full_disk(
    environment: dict[str, str],
) -> None:
    """If the run folder cannot be written, no process is started and the error names the
    setting."""
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
    program = f"{limit}from services.commands import main; sys.exit(main.main(['up']))"

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode == limits.EXIT_CONFIG, done.stderr
    assert "Cannot write" in done.stderr
    assert "set paths.run_dir" in done.stderr
    assert "Traceback" not in done.stderr
