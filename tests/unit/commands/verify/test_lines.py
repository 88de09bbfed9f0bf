"""The output of `lockstep verify`: what an operator reads, and what a program does."""

import json

from services.commands.verify.lines import Line, has_failed, render, summary, to_json

PASSED = Line(check="one request", verdict="PASS", seconds=0.1234, detail="24 tokens")
FAILED = Line(
    check="canary on every rank",
    verdict="FAIL",
    seconds=1.5,
    detail="they differ",
    remedy="Run `lockstep doctor`.",
    notes=["rank 0: a", "rank 1: b"],
)
SKIPPED = Line(check="clean shutdown", verdict="SKIP", detail="only with --shutdown")


def test_a_line_begins_with_its_verdict() -> None:
    """Verdict, check, seconds and detail in columns; notes and remedy below it."""
    assert render(PASSED) == "PASS  one request                   0.12 s  24 tokens"
    assert render(FAILED).splitlines() == [
        "FAIL  canary on every rank          1.50 s  they differ",
        "      rank 0: a",
        "      rank 1: b",
        "      remedy: Run `lockstep doctor`.",
    ]


def test_the_last_line_counts() -> None:
    """One FAIL is a FAIL; SKIP is none."""
    assert summary([PASSED, SKIPPED]) == "PASS  1 PASS, 0 FAIL, 1 SKIP"
    assert summary([PASSED, FAILED, SKIPPED]) == "FAIL  1 PASS, 1 FAIL, 1 SKIP"
    assert has_failed([PASSED, FAILED])
    assert not has_failed([PASSED, SKIPPED])


def test_json_says_the_same() -> None:
    """One document with a schema, whether all passed, and every check in full."""
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
