"""Report of a benchmark. Owns the JSON document and the tables; does not measure.

    python -m services.commands.bench.measuring.report FILE

prints the tables of a document that `--json` wrote.
"""

import io
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
from msgspec import Struct
from rich import box
from rich.console import Console
from rich.table import Table

from services.commands.bench.measuring.numbers import Spread, spread
from shared.errors import UsageError

PART = "part"
"""Condition that names a part of a benchmark; each part has tables of its own."""

SCHEMA = "lockstep.bench/1"
"""Version of the document; changes when a field changes its meaning."""

_TABLE_WIDTH = 10_000
"""Columns; wide enough that no row of a table is wrapped."""


class Case(Struct, kw_only=True):
    """One set of conditions, the contenders measured under it in turn, and their ratios.

    A contender is one of the programs or configurations that a benchmark compares.
    """

    conditions: dict[str, float | int | str]
    """Name -> value, such as {"prompt_tokens": 64, "clients": 16}; they label the table's row."""
    series: dict[str, dict[str, list[float]]] = {}
    """Contender -> metric -> one value per repeat."""
    ratios: dict[str, list[float]] = {}
    """"<contender>/<reference> <metric>" -> one ratio per repeat."""

    def add(self, contender: str, values: Mapping[str, float | None]) -> None:
        """Append one repeat of a contender: one value to the list of each metric.

        Args:
            contender: its name.
            values: metric -> value; a metric with the value None gets no entry.
        """
        metrics = self.series.setdefault(contender, {})
        for metric, value in values.items():
            if value is not None:
                metrics.setdefault(metric, []).append(value)

    def values(self, contender: str, metric: str) -> list[float]:
        """Return a contender's values of a metric, one per repeat; [] when it has none."""
        return self.series.get(contender, {}).get(metric, [])

    def add_ratios(self, contender: str, reference: str, *metrics: str) -> None:
        """Add a contender's metrics divided by the reference's, repeat by repeat.

        Leaves out a metric unless both have the same number of repeats and no divisor is zero.

        Args:
            contender: its values are the dividends.
            reference: contender whose values are the divisors.
            metrics: names of the metrics to divide.
        """
        for metric in metrics:
            measured, against = self.values(contender, metric), self.values(reference, metric)
            if measured and len(measured) == len(against) and all(against):
                self.ratios[f"{contender}/{reference} {metric}"] = [
                    one / other for one, other in zip(measured, against, strict=True)
                ]


class Report(Struct, kw_only=True):
    """Result of one run of one benchmark, from which the JSON document and the tables are made."""

    benchmark: str
    machine: dict[str, Any]
    settings: dict[str, Any] = {}
    """Parameters of the run, by name."""
    columns: list[str] = []
    """Metrics that the tables show, in order; empty: all metrics. Not part of the document."""
    cases: list[Case] = []
    notes: list[str] = []
    """Sentences below the tables, such as reasons to distrust a figure."""


def to_json(report: Report) -> str:
    """Return the JSON document that `--json` prints; the docstring of `bench.main` shows it."""
    document = {
        "schema": SCHEMA,
        "benchmark": report.benchmark,
        "machine": report.machine,
        "settings": report.settings,
        "cases": [
            {
                "conditions": case.conditions,
                "series": {name: _spreads(metrics) for name, metrics in case.series.items()},
                "ratios": _spreads(case.ratios),
            }
            for case in report.cases
        ],
        "notes": report.notes,
    }
    return orjson.dumps(document, default=msgspec.to_builtins, option=orjson.OPT_INDENT_2).decode()


def from_json(text: str | bytes) -> Report:
    """Return the report of which `to_json` wrote this document.

    Raises:
        UsageError: when the text is not such a document or has another version.
    """
    try:
        document = orjson.loads(text)
        if document["schema"] != SCHEMA:
            raise UsageError(f"The document has schema {document['schema']}, not {SCHEMA}.")
        return Report(
            benchmark=document["benchmark"],
            machine=document["machine"],
            settings=document["settings"],
            notes=document["notes"],
            cases=[
                Case(
                    conditions=case["conditions"],
                    series={name: _values(each) for name, each in case["series"].items()},
                    ratios=_values(case["ratios"]),
                )
                for case in document["cases"]
            ],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"Not a document of lockstep bench --json: {error!r}.") from None


def to_text(report: Report) -> str:
    """Return the report as text for a terminal: machine, settings, tables and notes."""
    lines = [f"lockstep bench {report.benchmark}"]
    lines += [f"  {key}: {value}" for key, value in report.machine.items()]
    lines += [f"  {key}: {value}" for key, value in report.settings.items()]
    lines += ["", "Every figure: median [low-high] of the repeats.", ""]
    if not report.cases:
        lines += ["Nothing was measured.", ""]
    for _, part in itertools.groupby(report.cases, lambda case: case.conditions.get(PART)):
        cases = list(part)
        lines += [*_measurements(cases, report.columns), ""]
        if ratios := _ratios(cases):
            lines += [*ratios, ""]
    lines.pop()
    if report.notes:
        lines += ["", *(f"* {note}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def format_spread(values: Spread) -> str:
    """Return "median [low-high]" with about three significant digits."""
    return f"{_digits(values.median)} [{_digits(values.low)}-{_digits(values.high)}]"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table whose columns are aligned.

    Args:
        header: titles of the columns.
        rows: texts of the cells, row by row.
    """
    grid = Table(box=box.MARKDOWN)
    for name in header:
        grid.add_column(name, no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    # Markup is off because figures contain square brackets.
    console = Console(
        file=io.StringIO(), width=_TABLE_WIDTH, force_terminal=False, markup=False, highlight=False
    )
    with console.capture() as capture:
        console.print(grid)
    return [line for line in capture.get().splitlines() if line.strip()]


def _measurements(cases: Sequence[Case], columns: Sequence[str]) -> list[str]:
    measured = [metric for case in cases for one in case.series.values() for metric in one]
    shown = [column for column in columns or dict.fromkeys(measured) if column in measured]
    if not shown:
        return ["Nothing was measured."]
    rows = [
        [*map(str, case.conditions.values()), name, *(_cell(one.get(key)) for key in shown)]
        for case in cases
        for name, one in case.series.items()
    ]
    return markdown_table([*cases[0].conditions, "contender", *shown], rows)


def _ratios(cases: Sequence[Case]) -> list[str]:
    names = list(dict.fromkeys(name for case in cases for name in case.ratios))
    if not names:
        return []
    rows = [
        [*map(str, case.conditions.values()), *(_cell(case.ratios.get(name)) for name in names)]
        for case in cases
    ]
    return markdown_table([*cases[0].conditions, *names], rows)


def _spreads(metrics: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    return {name: spread(values) for name, values in metrics.items()}


def _values(figures: Mapping[str, Any]) -> dict[str, list[float]]:
    return {name: figure["values"] for name, figure in figures.items()}


def _cell(values: Sequence[float] | None) -> str:
    return format_spread(spread(values)) if values else "-"


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 1_000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.3g}"


if __name__ == "__main__":
    sys.stdout.write(to_text(from_json(Path(sys.argv[1]).read_bytes())))
