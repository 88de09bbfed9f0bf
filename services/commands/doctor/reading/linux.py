"""Parsers of commands of Linux: GPUs, ports. Pure."""

import dataclasses
import re

GPU_QUERY = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total,memory.used",
    "--format=csv,noheader,nounits",
)
_SS = re.compile(r'\("([^"]{1,64})",pid=(\d{1,10})')


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU; memory in bytes."""

    name: str
    driver: str
    """Version of the driver."""
    total: int
    used: int


def read_gpus(text: str) -> list[Gpu]:
    """Parse the output of GPU_QUERY; return the GPUs in its order. Other lines are ignored."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        numbers = [field for field in fields[2:] if field.isascii() and field.isdecimal()]
        if len(fields) == 4 and len(numbers) == 2 and all(len(one) < 10 for one in numbers):
            total, used = (int(one) * 2**20 for one in numbers)
            found.append(Gpu(fields[0], fields[1], total, used))
    return found


def read_ss(text: str) -> list[tuple[str, int]]:
    """Parse the output of `ss -Hltnp`, which hides processes of other users.

    Returns:
        (command, process id) of each listening process, without duplicates.
    """
    return list(dict.fromkeys((name, int(pid)) for name, pid in _SS.findall(text)))
