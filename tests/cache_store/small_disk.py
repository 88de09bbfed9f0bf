"""A small disk in memory, on machines that permit mounting one."""

import os
import subprocess
import sys
from pathlib import Path

SIZE = "64m"


def mount_small_disk(folder: Path) -> bool:
    """Mount a disk of 64 MiB in memory; return False if that is not permitted."""
    if sys.platform != "linux":
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def unmount(folder: Path) -> None:
    """Undo `mount_small_disk`; do nothing if no disk is mounted."""
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
