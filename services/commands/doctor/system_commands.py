"""System commands. Runs one in its own process group, with a deadline and a limit of output."""

import dataclasses
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

OUTPUT_BYTES_MAX = 8 * 1024 * 1024
"""Limit of output; it is far above the output of every command used here."""
_READ_BYTES = 65_536


@dataclasses.dataclass(frozen=True, slots=True)
class CommandOutcome:
    """Output of a system command, and how it ended."""

    text: str = ""
    """Standard output."""
    errors: str = ""
    """Standard error."""
    code: int = 0
    """Exit code; -N if signal N ended it."""
    problem: str = ""
    """Why there is no answer: the command is missing, crashed, was too slow or printed too much;
    "" if it ended by itself."""

    @property
    def ok(self) -> bool:
        """Whether it ended with exit code 0."""
        return not self.problem and self.code == 0

    @property
    def why(self) -> str:
        """Reason in words why `ok` is False: the problem, or exit code and last line of output."""
        if self.problem:
            return self.problem
        last = (self.errors.strip() or self.text.strip()).rpartition("\n")[2]
        return f"it ended with exit code {self.code}" + (f" ({last[:300]})" if last else "")


RunCommand = Callable[[Sequence[str], float], CommandOutcome]
"""Runs a command, given the command and a deadline in seconds."""


def run_command(command: Sequence[str], deadline_s: float) -> CommandOutcome:
    """Run a command and return its outcome; never raise an error about the command itself.

    The command and its children have ended when this returns.

    Args:
        command: program and arguments.
        deadline_s: seconds that it may take, after which it is killed.
    """
    try:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = "is not on this machine" if missing else f"cannot be run: {error.strerror}"
        return CommandOutcome(problem=f"{command[0]} {why}")
    try:
        text, errors = _read(child, deadline_s)
    except subprocess.TimeoutExpired:
        return CommandOutcome(problem=f"{command[0]} did not answer within {deadline_s:g} s")
    except _TooMuchError:
        return CommandOutcome(problem=f"{command[0]} printed more than {OUTPUT_BYTES_MAX:,} bytes")
    finally:
        _kill(child)
    code = child.returncode
    problem = f"it was ended by {signal.Signals(-code).name}" if code < 0 else ""
    return CommandOutcome(text, errors, code, problem)


class _TooMuchError(Exception):
    """A process has written more than OUTPUT_BYTES_MAX."""


def _read(child: "subprocess.Popen[bytes]", deadline_s: float) -> list[str]:
    """Return standard output and standard error of a process.

    Raises:
        subprocess.TimeoutExpired: when it does not end in time.
        _TooMuchError: when it writes more than OUTPUT_BYTES_MAX.
    """
    assert child.stdout is not None
    assert child.stderr is not None
    end_s = time.monotonic() + deadline_s
    said = {child.stdout.fileno(): bytearray(), child.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for number in said:
            selector.register(number, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, end_s - time.monotonic()))
            if time.monotonic() >= end_s:
                raise subprocess.TimeoutExpired(child.args, deadline_s)
            for key, _ in ready:
                data = os.read(key.fd, _READ_BYTES)
                if not data:
                    selector.unregister(key.fd)
                said[key.fd] += data
            if sum(map(len, said.values())) > OUTPUT_BYTES_MAX:
                raise _TooMuchError
    child.wait(max(0.0, end_s - time.monotonic()))
    return [data.decode(errors="replace") for data in said.values()]


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its children, and collect its exit code."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        # macOS raises this for a group whose processes have all ended.
        child.kill()
    child.wait()
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()
