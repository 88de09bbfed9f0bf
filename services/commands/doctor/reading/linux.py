"""What files and commands of Linux say, as facts: name, memory, GPUs, ports. Pure."""

import dataclasses
import re

GPU_QUERY = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total,memory.used",
    "--format=csv,noheader,nounits",
)
_SS = re.compile(r'\("([^"]{1,64})",pid=(\d{1,10})')


@dataclasses.dataclass(frozen=True, slots=True)
class LinuxMemory:
    """Bytes."""

    total: int
    available: int


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; memory in bytes."""

    name: str
    driver: str
    total: int
    used: int


def read_os_release(text: str) -> str:
    """Return the pretty name of a Linux distribution; "": it has none."""
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "PRETTY_NAME":
            return value.strip().strip("\"'")[:100]
    return ""


def read_meminfo(text: str) -> LinuxMemory | None:
    """Return what /proc/meminfo says; None: nothing that could be used."""
    sizes = {
        match[1]: int(match[2]) * 1_024
        for match in re.finditer(r"^(\w+):\s+(\d{1,15}) kB", text, re.MULTILINE)
    }
    if "MemTotal" not in sizes:
        return None
    return LinuxMemory(sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemTotal"]))


def read_gpus(text: str) -> list[Gpu]:
    """Return the GPUs in order; lines that describe none are passed over."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        numbers = [field for field in fields[2:] if field.isascii() and field.isdecimal()]
        if len(fields) == 4 and len(numbers) == 2 and all(len(one) < 10 for one in numbers):
            total, used = (int(one) * 2**20 for one in numbers)
            found.append(Gpu(fields[0], fields[1], total, used))
    return found


def read_ss(text: str) -> list[tuple[str, int]]:
    """Return (command, process id) of each holder; those of other users are not shown."""
    return list(dict.fromkeys((name, int(pid)) for name, pid in _SS.findall(text)))
