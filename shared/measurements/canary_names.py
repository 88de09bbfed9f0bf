"""Names of canary findings, for the ranks that report them and the commands that show them."""

import re

SUM_PREFIX = "sum of "
PROMPT_PREFIX = "prompt of "

_DECODE = re.compile(r"(\d+) sums of a decode of (\d+) rows?")


def decode_name(sums: int, rows: int) -> str:
    """Return the name of the canary finding with the time of one decode step's collectives.

    Args:
        sums: number of all_sum collectives in the step.
        rows: number of sequences that the step decodes.
    """
    return f"{sums} sums of a decode of {rows} row{'' if rows == 1 else 's'}"


def parse_decode_name(name: str) -> tuple[int, int] | None:
    """Return (sums, rows) from a name made by `decode_name`; None for other names."""
    found = _DECODE.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None
