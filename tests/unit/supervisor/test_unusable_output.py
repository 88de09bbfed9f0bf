"""`lockstep up` where its surroundings fail: output that nobody takes, a disk without room."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import limits
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 90.0
"""Until a busy machine has started a few processes."""

UP = [sys.executable, "-m", "services.commands.main", "up"]


@pytest.fixture
def port() -> int:
    """A port that nobody has."""
    return free_port()


@pytest.fixture
def environment(tmp_path: Path, port: int) -> dict[str, str]:
    """Variables of a Lockstep of its own."""
    return {
        **os.environ,
        "LOCKSTEP_PATHS_RUN_DIR": str(tmp_path / "run"),
        "LOCKSTEP_GATEWAY_PORT": str(port),
        "LOCKSTEP_CACHE_SSD": "false",
    }


@contextlib.contextmanager
def _full_pipe() -> Iterator[int]:
    """Yield the write end of a pipe that takes nothing more, as nobody reads it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4_096)
    # Whoever gets it waits, as with any pipe.
    os.set_blocking(writing, True)
    assert not fcntl.fcntl(writing, fcntl.F_GETFL) & os.O_NONBLOCK
    try:
        yield writing
    finally:
        os.close(writing)
        os.close(reading)


def _serves_and_ends(process: "subprocess.Popen[bytes]", port: int) -> int:
    """Return the exit code after its gateway has listened, and it was told to end."""
    try:
        until_s = time.monotonic() + DEADLINE_S
        while True:
            assert process.poll() is None
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            assert time.monotonic() < until_s
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        return process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()


def test_output_that_nobody_reads_holds_nothing_up(environment: dict[str, str], port: int) -> None:
    """A pager that nobody scrolls, a terminal that was stopped: it starts, serves and ends."""
    with _full_pipe() as writing:
        process = subprocess.Popen(
            UP, cwd=ROOT, env=environment, stdout=writing, stderr=subprocess.DEVNULL
        )
        assert _serves_and_ends(process, port) == limits.EXIT_OK


def test_it_runs_without_standard_output(environment: dict[str, str], port: int) -> None:
    """`>&-`: nobody hears it, and nothing else changes."""
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *UP]
    process = subprocess.Popen(shell, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)

    assert _serves_and_ends(process, port) == limits.EXIT_OK


def test_a_disk_without_room_is_a_sentence(environment: dict[str, str]) -> None:
    """Nothing can be written to the run folder: exit 78, and what to do; nobody is started."""
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
