"""Bytes as people write and read them. Memory is counted in powers of two, as Apple sells it."""

import re

from shared.errors import UsageError

GIB = 2**30
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": GIB, "t": 2**40}
_SIZE = re.compile(
    r"(?:(?P<times>\d{1,2})x)?(?P<number>\d{1,16}(?:\.\d{1,9})?)\s*(?P<unit>[kmgt]?)(?:i?b)?"
)


def parse_sizes(text: str) -> list[int]:
    """Return the bytes that `512GB,2x192GB` names; GB and GiB are both 2**30 bytes.

    Raises:
        UsageError: it is no list of sizes, or one is 0.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _SIZE.fullmatch(part.strip().lower())
        size = int(float(match["number"]) * _UNITS[match["unit"]]) if match else 0
        times = int(match["times"] or 1) if match else 0
        if not size or not times or size > 2**50:
            raise UsageError(
                f"{part.strip()[:64]!r} is no size of memory: write for example 512GB, or "
                "512GB,192GB for two hosts."
            )
        found += [size] * times
    return found


def show(size: float) -> str:
    """Return bytes with a unit and three digits or so."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit:
            number = size / unit
            return f"{number:,.0f} {name}" if abs(number) >= 100 else f"{number:,.1f} {name}"
    return f"{size:,.0f} B"
