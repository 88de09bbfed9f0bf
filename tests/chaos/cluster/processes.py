"""Processes of this machine: roles, ages, descriptors, listening sockets, signals."""

import contextlib
import ipaddress
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from tests.support.process_table import waits_as_spare
from tests.support.waiting import wait_until


def child_roles(parent: int) -> dict[str, int]:
    """Return the pid of each Lockstep role that is a child of `parent`, by role name.

    Spares of ranks have no role yet.
    """
    found = {}
    for process, words in _commands():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "services.commands.main" not in words or process.ppid() != parent:
                continue
            role, *arguments = words[words.index("services.commands.main") + 1 :]
            if waits_as_spare(process.pid, words):
                continue
            if role == "rank-worker":
                found[f"rank {arguments[arguments.index('--rank') + 1]}"] = process.pid
            else:
                found["store" if role == "cache-store" else role] = process.pid
    return found


def spare_pids(folder: Path) -> list[int]:
    """Return the pids of spares of ranks that name a folder in their command."""
    return [
        process.pid
        for process, words in _commands()
        if any(str(folder) in word for word in words) and waits_as_spare(process.pid, words)
    ]


def pids_naming(folder: Path) -> list[int]:
    """Return all processes with this folder in their command: those of one stack, also orphans."""
    return [
        process.pid for process, words in _commands() if any(str(folder) in word for word in words)
    ]


def is_alive(pid: int) -> bool:
    """Return whether a process runs or is stopped; a zombie is not alive."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return False
    return status not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}


def pids_alive(pids: Iterable[int]) -> list[int]:
    """Return the processes of `pids` that are alive."""
    return [pid for pid in set(pids) if is_alive(pid)]


def wait_gone(pids: Iterable[int], deadline_s: float) -> list[int]:
    """Wait until no process of `pids` is alive; return those that are after `deadline_s`."""
    pids = list(pids)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not pids_alive(pids), deadline_s, poll_s=0.02)
    return pids_alive(pids)


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal; do nothing if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def age_s(pid: int) -> float:
    """Return the seconds since a process was started; 0 if it has ended."""
    try:
        # psutil knows the boot time, and so the age, only to a second.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return up_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        pass
    try:
        return float(time.time() - psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return 0.0


def treat_sigterm_as_interrupt() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that it stops its children."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def descriptor_count(pid: int) -> int:
    """Return the number of descriptors of a process; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).num_fds())
    except psutil.Error:
        return 0


def thread_count(pid: int) -> int:
    """Return the number of threads of a process; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).num_threads())
    except psutil.Error:
        return 0


def listening_sockets(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Return address and port of each TCP socket that these processes listen on."""
    found = set()
    for pid in pids:
        # The process may have ended.
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, connection.laddr.port))
    return sorted(found)


def is_loopback(address: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    return ipaddress.ip_address(address).is_loopback


def _commands() -> Iterator[tuple[psutil.Process, list[str]]]:
    """Yield each process with the words of its command; a zombie has none."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            yield process, process.cmdline()
