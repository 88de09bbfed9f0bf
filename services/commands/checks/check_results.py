"""Results of checks, for `lockstep doctor` and `lockstep verify`. Owns their text and exit code."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from services.commands.checks.text_table import table_lines
from shared import limits

EXIT_FAILED = 1
"""Exit code of a command that has found a FAIL."""

Verdict = Literal["PASS", "OK", "SKIP", "CANNOT CHECK", "WARN", "FAIL"]


class CheckResult(Struct, frozen=True, kw_only=True):
    """Result of one check: its verdict, the facts behind it, and the remedy."""

    check: str
    """Name of the check: stable, the same in text and JSON."""
    verdict: Verdict
    detail: str
    """Facts found, or the reason why nothing was checked."""
    remedy: str = ""
    """Exact command or change; "" if none is needed."""

    def cells(self) -> list[str]:
        """Return the cells of this result's row in a table: verdict, check, explanation.

        The explanation may have several lines.
        """
        return [self.verdict, self.check, self.explained()]

    def explained(self, notes: Sequence[str] = ()) -> str:
        """Return detail, notes and remedy, each on a line of its own.

        Args:
            notes: further facts.
        """
        remedy = [f"remedy: {self.remedy}"] if self.remedy else []
        return "\n".join([self.detail, *notes, *remedy])


def render(results: Iterable[CheckResult], widths_min: Sequence[int], *, indent: int = 0) -> str:
    """Return results as the text of a table, one row per result.

    Args:
        results: the results, in the order of their rows.
        widths_min: least widths of the first columns in characters, so that rows printed one by
            one align.
        indent: spaces before each line.
    """
    rows = [result.cells() for result in results]
    return "\n".join(table_lines(rows, widths_min=widths_min, indent=indent))


def count_verdicts(results: Iterable[CheckResult], verdicts: Iterable[Verdict]) -> str:
    """Count the results with each verdict, as text such as "3 PASS, 0 FAIL, 1 SKIP".

    Args:
        results: the results.
        verdicts: verdicts to count, in the order of the text.
    """
    counts = Counter(result.verdict for result in results)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts)


def has_failed(results: Iterable[CheckResult]) -> bool:
    """Return whether any verdict is FAIL."""
    return any(result.verdict == "FAIL" for result in results)


def exit_code(results: Iterable[CheckResult]) -> int:
    """Return EXIT_FAILED if any verdict is FAIL, else EXIT_OK."""
    return EXIT_FAILED if has_failed(results) else limits.EXIT_OK
