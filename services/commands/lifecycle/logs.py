"""Command `lockstep logs`. Owns the choice of lines, and where the log files are."""

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

import click

from services.commands.cli.click_support import Command
from services.commands.cli.flags import SettingSources, settings_options
from services.commands.cli.running_config import running_config
from services.commands.deployment.installation import LOG_DIR
from shared import limits
from shared.clock import unix_time_s
from shared.configuration.settings import Config
from shared.errors import UnavailableError, UsageError
from shared.log import files, lines
from shared.log.files import HostLog
from shared.log.lines import Line
from shared.os.process_file import ROLES
from shared.os.standard_streams import print_line

LINES = 100
"""Lines shown without --lines and --since."""

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_AGE = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>[smhd])")


@click.command(cls=Command)
@click.option("--role", type=click.Choice(ROLES), help="Only this role's lines.")
@click.option("--rank", metavar="R", type=click.IntRange(min=0), help="Only this rank's lines.")
@click.option("-f", "--follow", is_flag=True, help="Then show new lines until Ctrl-C.")
@click.option(
    "--since", metavar="WHEN", help="Only later lines: 10m, 2h, 1d, or 2026-01-31T08:00:00."
)
@click.option(
    "-n",
    "--lines",
    "count",
    metavar="N",
    type=click.IntRange(min=0),
    help=f"Only the last N lines (default: {LINES}; with --since: all).",
)
@click.option("--json", "as_json", is_flag=True, help="Show the lines as JSON.")
@settings_options
def logs(
    sources: SettingSources,
    *,
    role: str | None,
    rank: int | None,
    follow: bool,
    since: str | None,
    count: int | None,
    as_json: bool,
) -> int:
    """Show the log files of this host, all roles in order of time.

    They exist under launchd, and wherever log.directory is set.
    """
    folder = _folder(running_config(sources))
    since_s = parse_since(since, unix_time_s()) if since else 0.0
    if count is None and not since:
        count = LINES

    def is_wanted(line: Line) -> bool:
        if role is not None and line.get("role") != role:
            return False
        if rank is not None and (line.get("role"), line.get("rank")) != ("rank", rank):
            return False
        return float(line["time"]) >= since_s

    show: Callable[[Line], str] = lines.encode if as_json else lines.render_dated
    with contextlib.closing(HostLog(folder)) as log:
        for line in last(filter(is_wanted, log.read_all()), count):
            print_line(show(line))
        for line in filter(is_wanted, log.follow()) if follow else ():
            print_line(show(line))
    return limits.EXIT_OK


def last(found: Iterable[Line], count: int | None) -> Iterable[Line]:
    """Return the last `count` lines; None: all."""
    return found if count is None else deque(found, maxlen=count)


def parse_since(text: str, now_s: float) -> float:
    """Return the Unix time in seconds that a text names.

    Args:
        text: an age (`90s`, `10m`, `2h`, `1.5d`) or a date and time (`2026-01-31T08:00`), in this
            machine's time zone unless it names one.
        now_s: the present Unix time in seconds.

    Raises:
        UsageError: when it is neither.
    """
    if age := _AGE.fullmatch(text):
        return now_s - float(age["number"]) * _UNITS_S[age["unit"]]
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"--since {text} is no time: write an age (10m, 2h, 1d) or a date "
            f"({time.strftime('%Y-%m-%dT%H:%M', time.localtime(now_s))})."
        ) from None
    return moment.timestamp()


def _folder(config: Config) -> Path:
    """Return the folder of the log files. Raises UnavailableError: it has none."""
    folder = config.log_directory or Path(LOG_DIR)
    try:
        found = files.names(folder)
    except OSError as error:
        raise UnavailableError(
            f"Cannot read the log files in {folder}: {error.strerror}. Run this as the user that "
            "runs Lockstep."
        ) from None
    if found:
        return folder
    if config.log_directory is None:
        raise UnavailableError(
            "This Lockstep keeps no log files: it writes its log to standard output (under systemd "
            "`journalctl -u 'lockstep*'` shows it). Set log.directory to keep files."
        )
    raise UnavailableError(f"There are no log files in {folder}.")
