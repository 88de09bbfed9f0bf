"""What must change nothing: no fault at all, busy cores, a disk that is full, and who listens."""

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos import listening, processes
from tests.chaos.fault import Arena, Fault

QUIET_S = 3.0
STRESS_S = 20.0
DISK_FULL_S = 2.0
DISK_SIZE = "64m"
FILE_BYTES_MAX = 4_096


def _nothing(arena: Arena) -> None:
    time.sleep(QUIET_S)


def _busy_cores(arena: Arena) -> None:
    """Twice as many processes that do nothing but compute as there are cores."""
    before = arena.stack.status()
    busy = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        time.sleep(STRESS_S)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    arena.expect_same(before, arena.wait_served())


def _fill_disk(arena: Arena) -> None:
    before = arena.stack.status()
    began_s = time.monotonic()
    pid = arena.stack.pid("store")
    with full_disk(arena):
        time.sleep(DISK_FULL_S)
    time.sleep(1.0)
    arena.note("store_off lines", len(arena.stack.log.since(began_s, "store_off")))
    if not arena.stack.log.since(began_s, "store_off"):
        arena.complain("nobody noticed that the disk was full: the fault did not happen")
    if arena.stack.pid("store") != pid:
        arena.complain("the store ended")
    arena.expect_same(before, arena.wait_served())


@contextlib.contextmanager
def full_disk(arena: Arena) -> Iterator[None]:
    """Let the cache's disk be full: truly where it is a small one, else as a limit does it."""
    if os.path.ismount(arena.stack.disk):
        filler = arena.stack.disk / "filler"
        arena.stack.log.note("the disk is filled")
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**20))
        try:
            yield
        finally:
            filler.unlink()
        return
    pids = [pid for role, pid in arena.stack.pids().items() if role == "store" or "rank" in role]
    for pid in pids:
        _limit(pid, FILE_BYTES_MAX)
    try:
        yield
    finally:
        for pid in processes.pids_alive(pids):
            _limit(pid, resource.RLIM_INFINITY)


def _limit(pid: int, file_bytes_max: int) -> None:
    """Bound the files that a process writes (Linux)."""
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (file_bytes_max, resource.RLIM_INFINITY))


def mount_small_disk(folder: Path) -> bool:
    """Mount memory as a small disk where that is allowed; tell whether it was."""
    if sys.platform != "linux":
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def unmount(folder: Path) -> None:
    """Undo `mount_small_disk`."""
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _look_who_listens(arena: Arena) -> None:
    pids = [*arena.stack.pids().values(), *processes.naming(arena.stack.folder)]
    found = listening.sockets_of(pids)
    arena.note("listening sockets", len(found))
    if not any(port == arena.stack.port for _, port in found):
        arena.complain(f"the gateway's port is not among {found}: the look is worth nothing")
    off = [f"{address}:{port}" for address, port in found if not listening.is_loopback(address)]
    if off:
        arena.complain(f"somebody listens to strangers: {', '.join(off)}")


FAULTS = (
    Fault("none", "the baseline", _nothing, phase="mixed", loads=0, extra_s=5.0),
    Fault("busy-cores", "no false alarm", _busy_cores, phase="prefill", loads=0, extra_s=60.0),
    Fault("disk-full", "nobody notices", _fill_disk, phase="mixed", loads=0),
    Fault("listeners", "127.0.0.1 alone", _look_who_listens, phase="decode", loads=0),
)
