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

from services.commands.bench.measuring.numbers import Spread, pair_ratios, spread
from shared.errors import UsageError

PART = "part"
"""Condition that names a part of a benchmark; each part has tables of its own."""

SCHEMA = "lockstep.bench/1"
"""Version of the document; changes when a field changes its meaning."""

_TABLE_WIDTH = 10_000
"""Columns; wide enough that no row of a table is wrapped."""


class Series(Struct, kw_only=True):
    """All repeats of one contender's measurement under the conditions of one case.

    A contender is one of the programs or configurations that a benchmark compares.
    """

    name: str
    metrics: dict[str, list[float]] = {}
    """Metric -> one value per repeat."""

    def add(self, values: Mapping[str, float | None]) -> None:
        """Append one repeat: one value to the list of each metric.

        Args:
            values: metric -> value; a metric with the value None gets no entry.
        """
        for metric, value in values.items():
            if value is not None:
                self.metrics.setdefault(metric, []).append(value)


class Case(Struct, kw_only=True):
    """One set of conditions, the contenders measured under it in turn, and their ratios."""

    conditions: dict[str, float | int | str]
    """Name -> value, such as {"prompt_tokens": 64, "clients": 16}; they label the table's row."""
    series: dict[str, Series] = {}
    """Contender -> its measurements."""
    ratios: dict[str, list[float]] = {}
    """"<contender>/<reference> <metric>" -> one ratio per repeat."""

    def series_of(self, name: str) -> Series:
        """Return the series of a contender; create it if it does not exist."""
        return self.series.setdefault(name, Series(name=name))

    def add_ratio(self, metric: str, name: str, reference: str) -> None:
        """Add a contender's metric divided by the reference's, repeat by repeat.

        Adds nothing unless both have the same number of repeats and no divisor is zero.

        Args:
            metric: name of the metric to divide.
            name: contender whose values are the dividends.
            reference: contender whose values are the divisors.
        """
        measured = self.series_of(name).metrics.get(metric, [])
        against = self.series_of(reference).metrics.get(metric, [])
        if measured and len(measured) == len(against) and all(against):
            self.ratios[f"{name}/{reference} {metric}"] = pair_ratios(measured, against)


class Report(Struct, kw_only=True):
    """Result of one run of one benchmark, from which the JSON document and the tables are made."""

    benchmark: str
    machine: dict[str, Any]
    settings: dict[str, Any]
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
                "series": {
                    name: {metric: _spread(values) for metric, values in series.metrics.items()}
                    for name, series in case.series.items()
                },
                "ratios": {name: _spread(values) for name, values in case.ratios.items()},
            }
            for case in report.cases
        ],
        "notes": report.notes,
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()


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
            cases=[_case(case) for case in document["cases"]],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"Not a document of lockstep bench --json: {error!r}.") from None


def to_text(report: Report, columns: Sequence[str] = ()) -> str:
    """Return the report as text for a terminal: machine, settings, tables and notes.

    Args:
        report: the report to print.
        columns: metrics to show, in order; empty: all metrics of the report.
    """
    lines = [f"lockstep bench {report.benchmark}"]
    lines += [f"  {key}: {value}" for key, value in report.machine.items()]
    lines += [f"  {key}: {value}" for key, value in report.settings.items()]
    lines += ["", "Every figure: median [low-high] of the repeats.", ""]
    if not report.cases:
        lines += ["Nothing was measured.", ""]
    for _, part in itertools.groupby(report.cases, lambda case: case.conditions.get(PART)):
        cases = list(part)
        lines += [*_measurements(cases, columns), ""]
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
    measured = [metric for case in cases for one in case.series.values() for metric in one.metrics]
    shown = [column for column in columns or dict.fromkeys(measured) if column in measured]
    if not cases or not shown:
        return ["Nothing was measured."]
    conditions = list(cases[0].conditions)
    rows = [
        [
            *(str(case.conditions.get(key, "")) for key in conditions),
            name,
            *(_cell(series.metrics.get(column)) for column in shown),
        ]
        for case in cases
        for name, series in case.series.items()
    ]
    return markdown_table([*conditions, "contender", *shown], rows)


def _ratios(cases: Sequence[Case]) -> list[str]:
    names = list(dict.fromkeys(name for case in cases for name in case.ratios))
    if not names:
        return []
    conditions = list(cases[0].conditions)
    rows = [
        [
            *(str(case.conditions.get(key, "")) for key in conditions),
            *(_cell(case.ratios.get(name)) for name in names),
        ]
        for case in cases
    ]
    return markdown_table([*conditions, *names], rows)


def _case(document: Mapping[str, Any]) -> Case:
    return Case(
        conditions=document["conditions"],
        series={
            name: Series(
                name=name,
                metrics={metric: figures["values"] for metric, figures in metrics.items()},
            )
            for name, metrics in document["series"].items()
        },
        ratios={name: figures["values"] for name, figures in document["ratios"].items()},
    )


def _cell(values: Sequence[float] | None) -> str:
    return format_spread(spread(values)) if values else "-"


def _spread(values: Sequence[float]) -> dict[str, Any]:
    result: dict[str, Any] = msgspec.to_builtins(spread(values))
    return result


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
