"""The JSON document keeps its shape, and the tables show the same figures."""

import json

import pytest

from services.commands.bench.measuring.numbers import spread
from services.commands.bench.measuring.report import (
    SCHEMA,
    Case,
    Report,
    format_spread,
    from_json,
    markdown_table,
    to_json,
    to_text,
)
from shared.errors import UsageError


def _report() -> Report:
    case = Case(conditions={"prompt_tokens": 64, "clients": 16})
    for ours, ceiling in ((90.0, 100.0), (190.0, 200.0), (85.0, 100.0)):
        case.add("batch_generator", {"tokens_per_s": ceiling})
        case.add("lockstep", {"tokens_per_s": ours, "ttft_p50_ms": 12.0, "missing": None})
    case.add_ratios("lockstep", "batch_generator", "tokens_per_s", "ttft_p50_ms")
    return Report(
        benchmark="overhead",
        machine={"cores": 2},
        settings={"model": "tiny"},
        cases=[case],
        notes=["a note"],
    )


def test_bench_json_has_documented_keys_and_only_measured_metrics() -> None:
    """The document has the keys that `bench.main` documents and no metric that was not measured."""
    document = json.loads(to_json(_report()))
    assert document["schema"] == SCHEMA
    assert sorted(document) == [
        "benchmark",
        "cases",
        "machine",
        "notes",
        "schema",
        "settings",
    ]
    case = document["cases"][0]
    assert case["conditions"] == {"prompt_tokens": 64, "clients": 16}
    assert case["series"]["lockstep"]["tokens_per_s"] == {
        "median": 90.0,
        "low": 85.0,
        "high": 190.0,
        "values": [90.0, 190.0, 85.0],
    }
    assert "missing" not in case["series"]["lockstep"]
    assert list(case["ratios"]) == ["lockstep/batch_generator tokens_per_s"]
    assert case["ratios"]["lockstep/batch_generator tokens_per_s"]["median"] == 0.9


def test_bench_text_shows_machine_notes_and_medians_and_ratios_with_ranges() -> None:
    """The text has the machine, medians with ranges, ratios and notes; a missing metric is "-"."""
    report = _report()
    report.columns = ["tokens_per_s", "ttft_p50_ms", "never"]
    text = to_text(report)
    assert "cores: 2" in text
    assert "90.0 [85.0-190]" in text
    assert "0.90 [0.85-0.95]" in text
    assert "* a note" in text
    assert "never" not in text
    row = next(line for line in text.splitlines() if "batch_generator" in line)
    assert row.rstrip(" |").endswith("-")


def test_bench_text_says_nothing_was_measured_when_report_has_no_cases() -> None:
    """The text of a report without cases has one sentence and no table."""
    assert "Nothing was measured." in to_text(
        Report(benchmark="steps", machine={}, columns=["exposed_us_p50"])
    )


def test_bench_text_prints_numbers_with_about_three_significant_digits() -> None:
    """Numbers have about three significant digits, with commas between thousands."""
    assert format_spread(spread([1234.6])) == "1,235 [1,235-1,235]"
    assert format_spread(spread([123.4])) == "123 [123-123]"
    assert format_spread(spread([12.34])) == "12.3 [12.3-12.3]"
    assert format_spread(spread([1.234])) == "1.23 [1.23-1.23]"
    assert format_spread(spread([0.012345])) == "0.0123 [0.0123-0.0123]"
    assert format_spread(spread([0.0])) == "0.00 [0.00-0.00]"


def test_all_lines_of_bench_table_have_equal_length() -> None:
    """The columns of a table are aligned, so that all lines are equally long."""
    lines = markdown_table(["a", "long header"], [["wide cell", "1"], ["x", "2"]])
    assert len({len(line) for line in lines}) == 1
    assert lines[1].startswith("|-----------|")


def test_bench_json_read_back_prints_same_tables_as_original_report() -> None:
    """A document that is read back gives the same text; a text that is no such document is
    refused."""
    report = _report()
    assert to_text(from_json(to_json(report))) == to_text(report)
    for text in ("", "[]", "{}", '{"schema": "lockstep.bench/0"}'):
        with pytest.raises(UsageError):
            from_json(text)
