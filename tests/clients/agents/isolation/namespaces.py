"""Starts commands in namespaces of their own: no network, and no process that outlives them.

Owns how this machine permits it, and why not; what happens inside is in `loopback_only`.
"""

import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PROGRAM = Path(__file__).with_name("loopback_only.py")
_PARTS = ("--net", "--pid", "--fork", "--kill-child")
_WAYS = (("unshare", "--map-root-user", *_PARTS), ("unshare", *_PARTS))


@functools.cache
def missing_requirement() -> str:
    """Return why a command cannot be cut off from the network here; "" if it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if shutil.which("unshare") is None:
        return "`unshare` is not installed (Debian: apt install util-linux)"
    return "" if _way() else "network namespaces are not permitted here"


@functools.cache
def _way() -> Sequence[str]:
    """Return the start of a command that makes a network namespace; () if none is permitted."""
    for way in _WAYS:
        tried = subprocess.run([*way, "true"], check=False, capture_output=True)
        if tried.returncode == 0:
            return way
    return ()


class CutOffProcess:
    """A process whose only network is a loopback interface with one port.

    All that it started, and left running, ends with it.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        folder: Path,
        environment: Mapping[str, str],
        output: IO[bytes],
    ) -> None:
        """Start it.

        Args:
            command: program and arguments.
            port: the port on 127.0.0.1 that it can connect to; see `listener`.
            folder: its working directory.
            environment: its complete environment.
            output: file for all that it prints.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(30.0)
            inside = [sys.executable, str(PROGRAM), str(theirs.fileno()), str(port), *command]
            self.process = subprocess.Popen(
                [*_way(), *inside],
                cwd=folder,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            theirs.close()
            _, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
        self.listener = socket.socket(fileno=descriptors[0])
        """Accepts the connections that are made to the port; to be closed by who uses it."""

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
