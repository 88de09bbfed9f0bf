"""Which sockets some processes listen on, over TCP, as `ss -ltnp` would show them."""

import contextlib
import ipaddress
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"


def sockets_of(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Return (address, port) of every listening TCP socket of these processes."""
    wanted = sorted(set(pids))
    if Path("/proc/net/tcp").exists():
        return _from_proc(wanted)
    return _from_lsof(wanted)


def is_loopback(address: str) -> bool:
    """Tell whether only this machine can reach an address."""
    return address == "localhost" or ipaddress.ip_address(address).is_loopback


def _from_proc(pids: list[int]) -> list[tuple[str, int]]:
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.append((_address(address), int(port, 16)))
    return found


def _inodes(pid: int) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    links = []
    # The process, or one of its descriptors, may be gone by now.
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                links.append(str(entry.readlink()))
    return [link[8:-1] for link in links if link.startswith("socket:[")]


def _address(text: str) -> str:
    """Read an address as the kernel prints it: 32-bit words in this machine's order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def _from_lsof(pids: list[int]) -> list[tuple[str, int]]:
    command = ["lsof", "-nP", "-a", "-iTCP", "-sTCP:LISTEN", "-Fn", "-p", ",".join(map(str, pids))]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    names = [line[1:] for line in listed.splitlines() if line.startswith("n")]
    pairs = [name.rpartition(":") for name in names]
    return [(_named(host), int(port)) for host, _, port in pairs]


def _named(host: str) -> str:
    """Return an address for what lsof writes."""
    return "0.0.0.0" if host == "*" else host.strip("[]")
