"""Looking at processes of this machine, and sending signals to those that this harness started."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path


def children(parent: int) -> dict[str, int]:
    """Return the pid of every role that runs as a child of `parent`, by the supervisor's names."""
    found = {}
    for pid, its_parent, words in _running():
        if its_parent != parent or "services.commands.main" not in words:
            continue
        role, *rest = words[words.index("services.commands.main") + 1 :]
        if role == "rank-worker":
            found[f"rank {rest[rest.index('--rank') + 1]}"] = pid
        else:
            found["store" if role == "cache-store" else role] = pid
    return found


def naming(folder: Path) -> list[int]:
    """Return the processes in whose command this folder stands: all of one stack, orphans too."""
    return [pid for pid, _, words in _running() if any(str(folder) in word for word in words)]


def is_alive(pid: int) -> bool:
    """Tell whether a process runs or is stopped; one that waits to be reaped does neither."""
    return bool(pids_alive([pid]))


def pids_alive(pids: Iterable[int]) -> list[int]:
    """Return those of `pids` that run or are stopped."""
    wanted = set(pids)
    if Path("/proc/self/stat").exists():
        return [pid for pid in wanted if _state(pid) not in ("", "Z", "X")]
    return [pid for pid, _, _ in _running() if pid in wanted]


def wait_gone(pids: Iterable[int], deadline_s: float) -> list[int]:
    """Wait until none of `pids` runs; return those that still do after `deadline_s`."""
    until_s = time.monotonic() + deadline_s
    while (left := pids_alive(pids)) and time.monotonic() < until_s:
        time.sleep(0.02)
    return left


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; a process that is gone already needs none."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def age_s(pid: int) -> float:
    """Return for how long a process has been there, 0 when it is gone; to a second at worst."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return up_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        listed = subprocess.run(
            ["ps", "-o", "etime=", "-p", str(pid)], check=False, capture_output=True, text=True
        )
    days, _, clock = listed.stdout.strip().rpartition("-")
    seconds = 0
    for part in clock.split(":") if clock else []:
        seconds = 60 * seconds + int(part)
    return 86_400.0 * int(days or 0) + seconds


def end_as_interrupted() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that it cleans up behind itself."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def open_files(pid: int) -> int:
    """Return how many descriptors a process holds; 0 where the system does not tell."""
    return _entries(f"/proc/{pid}/fd")


def threads(pid: int) -> int:
    """Return how many threads a process has; 0 where the system does not tell."""
    return _entries(f"/proc/{pid}/task")


def _entries(folder: str) -> int:
    try:
        return len(list(Path(folder).iterdir()))
    except OSError:
        return 0


def _state(pid: int) -> str:
    """Return the state letter of a process, "" when there is none (Linux)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def _running() -> list[tuple[int, int, list[str]]]:
    """Return (pid, parent, words of the command) of all processes but those to be reaped."""
    listed = subprocess.run(
        ["ps", "-axwwo", "pid=,ppid=,stat=,command="], check=True, capture_output=True, text=True
    )
    entries = (line.split() for line in listed.stdout.splitlines())
    return [
        (int(entry[0]), int(entry[1]), entry[3:])
        for entry in entries
        if len(entry) > 3 and not entry[2].startswith("Z")
    ]
