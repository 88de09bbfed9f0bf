"""Command `lockstep trace`. Owns how long it records, and the file that it writes."""

import sys
import time
from pathlib import Path

import click
import orjson

from services.commands.cli.click_support import Command
from services.commands.cli.flags import SettingSources, settings_options
from services.commands.cli.running_config import running_config
from services.supervisor.console.console import Console
from services.supervisor.status.profile_query import ProfileQuery
from shared import limits
from shared.errors import UsageError
from shared.measurements.step_losses import largest_loss
from shared.measurements.trace import MARGIN_S, REPORT_S, SECONDS_MAX, build_trace
from shared.os.standard_streams import exit_code_if_written

MEASURED_STEPS = 8
"""Steps that are measured part by part, so that the trace shows the parts."""


@click.command(cls=Command)
@settings_options
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, SECONDS_MAX),
    default=10.0,
    help="How long to record (default: 10).",
)
@click.option(
    "-o",
    "--output",
    "file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("trace.json"),
    help="File for the trace (default: trace.json).",
)
@click.option(
    "--parts/--no-parts",
    default=True,
    help=f"Measure the next {MEASURED_STEPS} steps part by part (default: yes).",
)
def trace(sources: SettingSources, *, seconds: float, file: Path, parts: bool) -> int:
    """Record what gateways, scheduler and ranks do in the next seconds, for ui.perfetto.dev.

    The file has tracks for HTTP requests with their writes, for requests and plans, and for host,
    device, restores and spills of each rank. Arrows lead from an HTTP request to its plans, from a
    plan to its step on each rank, and from there to the writes of its tokens. The largest loss in
    the measured steps is printed, and is in the file too.
    """
    config, console = running_config(sources), Console(sys.stdout)
    with ProfileQuery(config) as query:
        query.status()
        began_s = time.monotonic()
        query.record(seconds + REPORT_S)
        if parts:
            query.order(MEASURED_STEPS, primitives=False)
        query.wait(seconds + REPORT_S)
        report = query.trace(time.monotonic() - began_s + MARGIN_S)
    try:
        file.write_bytes(orjson.dumps(build_trace(report)))
    except OSError as error:
        raise UsageError(f"The trace cannot be written to {file}: {error.strerror}.") from None
    counts = f"{len(report.steps)} steps, {len(report.requests)} requests and "
    counts += f"{sum(len(one.http_requests) for one in report.gateways)} HTTP requests"
    console.print_line(f"{counts} are in {file}: open it at ui.perfetto.dev or chrome://tracing.")
    if loss := largest_loss(report.measured, len(report.hosts)):
        console.print_line(loss)
    return exit_code_if_written(limits.EXIT_OK, console.write_error)
