"""How the canary's findings are named, for those who compute them and those who show them."""

import re

SUM = "sum of "
PROMPT = "prompt of "

_DECODE = re.compile(r"(\d+) sums of a decode of (\d+) rows?")


def decode_name(sums: int, rows: int) -> str:
    """Name the collectives of a decode of so many rows."""
    return f"{sums} sums of a decode of {rows} row{'' if rows == 1 else 's'}"


def read_decode_name(name: str) -> tuple[int, int] | None:
    """Return (sums, rows) of such a name; None of another one."""
    found = _DECODE.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None
