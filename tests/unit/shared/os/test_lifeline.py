"""The pipe that ends a child when its parent is gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shared import limits
from shared.os import lifeline

ROOT = Path(__file__).resolve().parents[4]
HOLDER = (
    "import ctypes, os, subprocess, sys\n"
    "from shared.os import lifeline\n"
    "if len(sys.argv) > 1:\n"
    "    lifeline.exit_with_parent()\n"
    "    with lifeline.killed_with_parent():\n"
    "        print(os.getpid(), flush=True)\n"
    "        ctypes.PyDLL(None).sleep(60)\n"
    "read_end, write_end = os.pipe()\n"
    "os.environ[lifeline.VARIABLE] = str(read_end)\n"
    "subprocess.run([sys.executable, '-c', sys.orig_argv[2], 'child'], pass_fds=(read_end,))\n"
)
"""A parent whose child holds the GIL in C code, as MLX does while it waits for its peers."""

SLEEPER = (
    "from shared.os import lifeline; lifeline.exit_with_parent(); "
    "import time; print('up', flush=True); time.sleep(60)"
)


def _start(read_end: int) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        cwd=ROOT,
        pass_fds=(read_end,),
        env={**os.environ, lifeline.VARIABLE: str(read_end)},
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(read_end)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_a_child_ends_when_the_pipe_closes() -> None:
    """Closing the write end, as the death of the parent does, ends the child, which would sleep."""
    read_end, write_end = os.pipe()
    with _start(read_end) as process:
        assert process.poll() is None

        os.close(write_end)

        assert process.wait(timeout=20) == limits.EXIT_LIFELINE


def test_a_child_that_holds_the_interpreter_ends_with_its_parent() -> None:
    """No thread of it can run, so the kernel ends it (on Linux; elsewhere a deadline does)."""
    parent = subprocess.Popen(
        [sys.executable, "-c", HOLDER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()

    until_s = time.monotonic() + 20.0
    while sys.platform == "linux" and _is_alive(child):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    if sys.platform != "linux":
        os.kill(child, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        # The latter when it is reaped between the opening of its file and the reading.
        return False
    return state != "Z"


def test_bytes_on_the_pipe_mean_nothing() -> None:
    """Only the end of the pipe counts: a byte that strays into it ends nobody."""
    read_end, write_end = os.pipe()
    with _start(read_end) as process:
        os.write(write_end, b"hello")
        time.sleep(0.2)

        assert process.poll() is None

        os.close(write_end)
        process.wait(timeout=20)


def test_without_a_lifeline_nothing_is_watched() -> None:
    """A role that was started by hand runs without a pipe, whatever stands in the variable."""
    for value in ("", "x", "-1"):
        script = f"import os; os.environ['{lifeline.VARIABLE}'] = '{value}'; {SLEEPER}"
        script = script.replace("time.sleep(60)", "time.sleep(0.1)")

        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, timeout=30)

        assert done.returncode == 0
