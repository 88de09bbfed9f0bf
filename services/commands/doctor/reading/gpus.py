"""GPUs: `nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv,...`."""

import dataclasses

QUERY = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total,memory.used",
    "--format=csv,noheader,nounits",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; memory in bytes."""

    name: str
    driver: str
    total: int
    used: int


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
