"""What ranks must agree on before they compute together, and how they find out. Pure, no MLX.

While it loads, a rank takes its number of forwards, and with them of collectives, from its own
model and settings. Ranks that take different ones wait for each other for ever, or add up numbers
of different things. So each writes down what decides it, in one row of fixed length; the rows are
exchanged by one collective, and every rank compares all of them.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

SHOWN_BYTES = 24
"""Of a value, what others get to see; what it is compared by covers all of it."""

DIGEST_BYTES = 8
_CELL_BYTES = SHOWN_BYTES + DIGEST_BYTES

Facts = Mapping[str, str]
"""What decides the collectives of loading, by name: the same names in one order on all ranks."""


def load_facts(
    *,
    code: str,
    fingerprint: str,
    context_tokens_max: int,
    method: str,
    draft_fingerprint: str,
    kv_bits: int,
) -> Facts:
    """Return what decides how many and which collectives a rank runs while it loads.

    Args:
        code: which Lockstep this is.
        fingerprint: of the model as it is loaded.
        context_tokens_max: longest sequence; the warm-up and the canary stay within it.
        method: `speculation.method`: the warm-up verifies drafts, or lets the rank propose them.
        draft_fingerprint: of the draft model or head; "": there is none.
        kv_bits: `rank_worker.kv_bits`.
    """
    return {
        "lockstep": code,
        "model (path, dtype, files, versions of mlx and mlx-lm)": fingerprint,
        "model.context_tokens_max": str(context_tokens_max),
        "speculation.method": method,
        "speculation.draft_model": draft_fingerprint or "none",
        "rank_worker.kv_bits": str(kv_bits),
    }


def row(facts: Facts) -> list[int]:
    """Return facts as int32 numbers, as many whatever the values are.

    Of each value the beginning and a digest, then a digest of the whole row.
    """
    cells = b"".join(
        text.encode()[:SHOWN_BYTES].ljust(SHOWN_BYTES, b"\0") + _digest(text.encode())
        for text in facts.values()
    )
    return [int(number) for number in np.frombuffer(cells + _digest(cells), dtype="<i4")]


def is_whole(rows: Sequence[Sequence[int]]) -> bool:
    """Tell whether rows have arrived as they were sent; wrong sums are the canary's to name."""
    written = [np.array(one, dtype="<i4").tobytes() for one in rows]
    return all(one[-DIGEST_BYTES:] == _digest(one[:-DIGEST_BYTES]) for one in written)


def difference(facts: Facts, rows: Sequence[Sequence[int]]) -> str | None:
    """Return what ranks have set up differently, as one sentence; None when nothing is.

    Args:
        facts: this rank's.
        rows: of all ranks, in rank order.
    """
    columns = zip(*(_cells(one, len(facts)) for one in rows), strict=True)
    named = [
        f"{name} is {_values(cells)}"
        for name, cells in zip(facts, columns, strict=True)
        if len(set(cells)) > 1
    ]
    if not named:
        return None
    return (
        f"The ranks are set up differently: {'; '.join(named)}. Give every rank the same "
        "Lockstep, model and settings."
    )


def _cells(numbers: Sequence[int], count: int) -> list[bytes]:
    written = np.array(numbers, dtype="<i4").tobytes()
    return [written[_CELL_BYTES * one : _CELL_BYTES * (one + 1)] for one in range(count)]


def _values(cells: Sequence[bytes]) -> str:
    """Return who has which value: those with the same one together, in rank order."""
    holders: dict[bytes, list[int]] = {}
    for rank, cell in enumerate(cells):
        holders.setdefault(cell, []).append(rank)
    said = []
    for cell, ranks in holders.items():
        value = cell[:SHOWN_BYTES].rstrip(b"\0").decode(errors="ignore")
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        said.append(f"{value} on {who}")
    return " and ".join(said)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
