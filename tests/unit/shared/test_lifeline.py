"""The pipe that ends a child when its parent is gone."""

import os
import subprocess
import sys
import time
from pathlib import Path

from shared import lifeline, limits

ROOT = Path(__file__).resolve().parents[3]
SLEEPER = (
    "from shared import lifeline; lifeline.watch(); "
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
    """Closing the write end, as the death of the parent does, ends the child within a second."""
    read_end, write_end = os.pipe()
    with _start(read_end) as process:
        assert process.poll() is None

        closed_s = time.monotonic()
        os.close(write_end)

        assert process.wait(timeout=10) == limits.EXIT_LIFELINE
        assert time.monotonic() - closed_s < 5.0


def test_bytes_on_the_pipe_mean_nothing() -> None:
    """Only the end of the pipe counts: a byte that strays into it ends nobody."""
    read_end, write_end = os.pipe()
    with _start(read_end) as process:
        os.write(write_end, b"hello")
        time.sleep(0.2)

        assert process.poll() is None

        os.close(write_end)
        process.wait(timeout=10)


def test_without_a_lifeline_nothing_is_watched() -> None:
    """A role that was started by hand runs without a pipe, whatever stands in the variable."""
    for value in ("", "x", "-1"):
        script = f"import os; os.environ['{lifeline.VARIABLE}'] = '{value}'; {SLEEPER}"
        script = script.replace("time.sleep(60)", "time.sleep(0.1)")

        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, timeout=30)

        assert done.returncode == 0
