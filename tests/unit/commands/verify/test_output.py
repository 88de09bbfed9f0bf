"""Text and JSON of `lockstep verify`."""

import json

from services.commands.checks.check_results import has_failed, render
from services.commands.verify.command import _WIDTHS, summary, to_json
from services.commands.verify.judging import TimedCheck

PASSED = TimedCheck(check="one request", verdict="PASS", seconds=0.1234, detail="24 tokens")
FAILED = TimedCheck(
    check="canary on every rank",
    verdict="FAIL",
    seconds=1.5,
    detail="they differ",
    remedy="Run `lockstep doctor`.",
    notes=["rank 0: a", "rank 1: b"],
)
SKIPPED = TimedCheck(check="clean shutdown", verdict="SKIP", detail="only with --shutdown")


def test_verify_prints_check_with_verdict_duration_and_detail_in_one_row() -> None:
    """One row has the verdict, the check, the seconds and the detail; notes and remedy stand below
    it."""
    assert render([PASSED], _WIDTHS) == "PASS  one request                   0.12 s  24 tokens"
    assert render([FAILED], _WIDTHS).splitlines() == [
        "FAIL  canary on every rank          1.50 s  they differ",
        f"{'':44}rank 0: a",
        f"{'':44}rank 1: b",
        f"{'':44}remedy: Run `lockstep doctor`.",
    ]


def test_verify_summary_counts_verdicts_and_is_fail_when_one_check_fails() -> None:
    """The summary counts the verdicts; one FAIL makes it a FAIL, and a SKIP does not."""
    assert summary([PASSED, SKIPPED]) == "PASS  1 PASS, 0 FAIL, 1 SKIP"
    assert summary([PASSED, FAILED, SKIPPED]) == "FAIL  1 PASS, 1 FAIL, 1 SKIP"
    assert has_failed([PASSED, FAILED])
    assert not has_failed([PASSED, SKIPPED])


def test_verify_json_has_schema_and_every_check() -> None:
    """The document has its schema, every check, and whether all checks passed."""
    document = json.loads(to_json([PASSED, FAILED]))
    assert (document["schema"], document["passed"]) == ("lockstep.verify/1", False)
    assert document["checks"][0] == {
        "check": "one request",
        "verdict": "PASS",
        "seconds": 0.1234,
        "detail": "24 tokens",
        "remedy": "",
        "notes": [],
    }
    assert document["checks"][1]["remedy"] == "Run `lockstep doctor`."
