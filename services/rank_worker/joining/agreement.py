"""Compares the facts that ranks must share before they compute together. Pure, no MLX.

While loading, a rank's own model and settings determine how many collectives it runs. Ranks that
differ would wait for each other for ever or sum unrelated numbers. So each rank encodes these facts
as a row of fixed length, one collective exchanges the rows, and every rank compares them.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

SHOWN_BYTES = 24
"""Bytes of a value that error messages show. The comparison covers the whole value."""

DIGEST_BYTES = 8
_CELL_BYTES = SHOWN_BYTES + DIGEST_BYTES

Facts = Mapping[str, str]
"""Facts that determine the collectives of loading, by name; same names and order on all ranks."""


def encode_row(facts: Facts) -> list[int]:
    """Encode facts as int32 numbers, whose count depends only on the number of facts.

    The row holds the beginning and a digest of each value, then a digest of the row itself.
    """
    cells = b"".join(
        text.encode()[:SHOWN_BYTES].ljust(SHOWN_BYTES, b"\0") + _digest(text.encode())
        for text in facts.values()
    )
    return [int(number) for number in np.frombuffer(cells + _digest(cells), dtype="<i4")]


def rows_intact(rows: Sequence[Sequence[int]]) -> bool:
    """Tell whether every rank's row matches the digest at its end.

    If not, the collective that exchanged the rows returned wrong numbers.
    """
    encoded = [np.array(one, dtype="<i4").tobytes() for one in rows]
    return all(one[-DIGEST_BYTES:] == _digest(one[:-DIGEST_BYTES]) for one in encoded)


def find_difference(facts: Facts, rows: Sequence[Sequence[int]]) -> str | None:
    """Return a sentence about the facts that differ between ranks; None when all are equal.

    Args:
        facts: this rank's facts, whose names are used.
        rows: facts of all ranks from `encode_row`, in rank order.
    """
    columns = zip(*(_cells(one, len(facts)) for one in rows), strict=True)
    different = [
        f"{name} is {_values(cells)}"
        for name, cells in zip(facts, columns, strict=True)
        if len(set(cells)) > 1
    ]
    if not different:
        return None
    return (
        f"The ranks are set up differently: {'; '.join(different)}. Give every rank the same "
        "Lockstep, model and settings."
    )


def _cells(numbers: Sequence[int], count: int) -> list[bytes]:
    encoded = np.array(numbers, dtype="<i4").tobytes()
    return [encoded[_CELL_BYTES * one : _CELL_BYTES * (one + 1)] for one in range(count)]


def _values(cells: Sequence[bytes]) -> str:
    """Return the values with the ranks that have each, in rank order."""
    holders: dict[bytes, list[int]] = {}
    for rank, cell in enumerate(cells):
        holders.setdefault(cell, []).append(rank)
    parts = []
    for cell, ranks in holders.items():
        value = cell[:SHOWN_BYTES].rstrip(b"\0").decode(errors="ignore")
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        parts.append(f"{value} on {names}")
    return " and ".join(parts)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
