"""What `lockstep verify` says: one line per check, for people and as JSON. Pure."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

SCHEMA = "lockstep.verify/1"
"""Changes when a field of the document changes its meaning."""

Verdict = Literal["PASS", "FAIL", "SKIP"]

_CHECK_WIDTH = 26


class Line(Struct, frozen=True, kw_only=True):
    """One check."""

    check: str
    """Its name: stable, the same in text and JSON."""
    verdict: Verdict
    seconds: float = 0.0
    detail: str
    """What was found; of SKIP, why it was not looked for."""
    remedy: str = ""
    """Of FAIL: what to do now."""
    notes: list[str] = []
    """Further findings, one per line."""


def render(line: Line) -> str:
    """Return a check as text, its remedy and notes below it."""
    shown = f"{line.verdict}  {line.check:<{_CHECK_WIDTH}}  {line.seconds:6.2f} s  {line.detail}"
    below = [f"      {note}" for note in line.notes]
    if line.remedy:
        below.append(f"      remedy: {line.remedy}")
    return "\n".join([shown, *below])


def summary(lines: Sequence[Line]) -> str:
    """Return the last line: how many of each."""
    counts = ", ".join(
        f"{sum(line.verdict == verdict for line in lines)} {verdict}"
        for verdict in ("PASS", "FAIL", "SKIP")
    )
    return f"{'FAIL' if has_failed(lines) else 'PASS'}  {counts}"


def has_failed(lines: Sequence[Line]) -> bool:
    """Tell whether any check failed."""
    return any(line.verdict == "FAIL" for line in lines)


def to_json(lines: Sequence[Line]) -> str:
    """Return one document."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "passed": not has_failed(lines),
        "checks": msgspec.to_builtins(list(lines)),
    }
    return msgspec.json.format(msgspec.json.encode(document)).decode()
