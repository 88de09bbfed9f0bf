"""Memory: `vm_stat` and `memory_pressure -Q` of macOS, `/proc/meminfo` of Linux."""

import dataclasses
import re

_PAGE = re.compile(r"page size of (\d{1,9}) bytes")
_WIRED = re.compile(r"^Pages wired down:\s+(\d{1,15})\.?", re.MULTILINE)
_FREE = re.compile(r"free percentage:\s*(\d{1,3})\s*%")


@dataclasses.dataclass(frozen=True, slots=True)
class LinuxMemory:
    """Bytes."""

    total: int
    available: int


def read_wired(text: str) -> int | None:
    """Return the bytes that `vm_stat` says are wired; None: it does not say."""
    page, wired = _PAGE.search(text), _WIRED.search(text)
    return int(page[1]) * int(wired[1]) if page and wired else None


def read_free_part(text: str) -> float | None:
    """Return the part of memory that `memory_pressure -Q` calls free, 0 to 1."""
    match = _FREE.search(text)
    return min(1.0, int(match[1]) / 100) if match else None


def read_number(text: str) -> int | None:
    """Return a number that stands alone, as `sysctl -n` writes it."""
    word = text.strip()
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 20 else None


def read_meminfo(text: str) -> LinuxMemory | None:
    """Return what /proc/meminfo says; None: nothing that could be used."""
    sizes = {
        match[1]: int(match[2]) * 1_024
        for match in re.finditer(r"^(\w+):\s+(\d{1,15}) kB", text, re.MULTILINE)
    }
    if "MemTotal" not in sizes:
        return None
    return LinuxMemory(sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemTotal"]))
