"""The pipe that ends a child process when its parent has ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shared import limits
from shared.os import lifeline
from tests.support.process_table import wait_until_ended

ROOT = Path(__file__).resolve().parents[4]
GIL_HOLDER = (
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
"""A parent whose child holds the GIL in C code, as MLX does in a collective."""

SLEEPER = (
    "from shared.os import lifeline; lifeline.exit_with_parent(); "
    "import time; print('up', flush=True); time.sleep(60)"
)

WAITER = (
    "from shared.os import lifeline; lifeline.exit_with_parent(); "
    "print('up', flush=True); lifeline.wait_for_turn(); print('turn', flush=True); "
    "import time; time.sleep(60)"
)


def _start(read_end: int, program: str = SLEEPER) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", program],
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


def test_child_process_ends_when_its_lifeline_pipe_closes() -> None:
    """The child ends when the write end closes, as it does when the parent dies."""
    read_end, write_end = os.pipe()
    with _start(read_end) as process:
        assert process.poll() is None

        os.close(write_end)

        assert process.wait(timeout=20) == limits.EXIT_LIFELINE


def test_child_process_goes_on_at_its_turn_and_still_ends_with_its_lifeline() -> None:
    """A waiting child continues when its parent gives it its turn, and is watched as before."""
    read_end, write_end = os.pipe()
    with _start(read_end, WAITER) as process:
        assert process.stdout is not None

        lifeline.give_turn(write_end)
        assert process.stdout.readline() == "turn\n"

        os.close(write_end)
        assert process.wait(timeout=20) == limits.EXIT_LIFELINE


def test_waiting_child_process_ends_without_turn_when_its_lifeline_closes() -> None:
    """A child whose parent dies before its turn ends without going on."""
    read_end, write_end = os.pipe()
    with _start(read_end, WAITER) as process:
        os.close(write_end)

        assert process.wait(timeout=20) == limits.EXIT_LIFELINE
        assert process.stdout is not None
        assert process.stdout.read() == ""


def test_child_process_that_holds_gil_ends_when_parent_dies() -> None:
    """No Python thread can run in the child, so the kernel ends it. Only Linux can do this."""
    parent = subprocess.Popen(
        [sys.executable, "-c", GIL_HOLDER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()

    if sys.platform == "linux":
        wait_until_ended([child], 20.0)
    else:
        os.kill(child, signal.SIGKILL)


def test_child_process_continues_when_bytes_arrive_on_lifeline_pipe() -> None:
    """Only the end of the pipe counts; bytes that are written to it have no effect."""
    read_end, write_end = os.pipe()
    with _start(read_end) as process:
        os.write(write_end, b"hello")
        time.sleep(0.2)

        assert process.poll() is None

        os.close(write_end)
        process.wait(timeout=20)


def test_process_without_valid_lifeline_pipe_keeps_running() -> None:
    """A role that was started by hand runs without a pipe, for any value of the variable."""
    for value in ("", "x", "-1"):
        script = f"import os; os.environ['{lifeline.VARIABLE}'] = '{value}'; {SLEEPER}"
        script = script.replace("time.sleep(60)", "time.sleep(0.1)")

        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, timeout=30)

        assert done.returncode == 0
