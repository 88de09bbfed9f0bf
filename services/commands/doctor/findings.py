"""What the doctor says: one line per check, with a remedy unless all is well."""

from typing import Literal

from msgspec import Struct

Verdict = Literal["OK", "WARN", "FAIL", "CANNOT CHECK"]
SEVERITY: dict[Verdict, int] = {"OK": 0, "CANNOT CHECK": 1, "WARN": 2, "FAIL": 3}


class Finding(Struct, frozen=True, kw_only=True):
    """One check of one host, or of several together."""

    host: str
    """Whose; "" for what concerns several."""
    check: str
    """What was looked at."""
    verdict: Verdict
    cause: str
    """What was found."""
    remedy: str = ""
    """What to do, as exactly as can be; "" where nothing is to be done."""


class Findings:
    """Collects findings about one host."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.all: list[Finding] = []

    def ok(self, check: str, cause: str) -> None:
        """All is well."""
        self._add(check, "OK", cause, "")

    def warn(self, check: str, cause: str, remedy: str) -> None:
        """It works, but not as well or not for as long as it should."""
        self._add(check, "WARN", cause, remedy)

    def fail(self, check: str, cause: str, remedy: str) -> None:
        """It does not work."""
        self._add(check, "FAIL", cause, remedy)

    def unknown(self, check: str, cause: str, remedy: str = "") -> None:
        """It cannot be checked here."""
        self._add(check, "CANNOT CHECK", cause, remedy)

    def _add(self, check: str, verdict: Verdict, cause: str, remedy: str) -> None:
        self.all.append(
            Finding(host=self.host, check=check, verdict=verdict, cause=cause, remedy=remedy)
        )
