"""Command `lockstep drain`. Owns the order to the scheduler, and the wait for open requests."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Self

import click

from services.commands.cli.click_support import Command, seconds
from services.commands.cli.flags import SettingSources, settings_options
from services.commands.cli.running_config import running_config
from services.supervisor.console.console import Console
from services.supervisor.status.service_queries import (
    ANSWER_DEADLINE_S,
    StatusWatch,
    no_answer_error,
)
from shared import limits
from shared.clock import SystemClock
from shared.configuration.settings import Config
from shared.errors import UnavailableError
from shared.messages import OrderDrain, StatusReported
from shared.os.standard_streams import exit_code_if_written

_STATUS_INTERVAL_S = 0.25


def wait_option(summary: str) -> Callable[..., Any]:
    """Return a decorator that adds the option `--wait`, in seconds, with this help text."""
    return click.option(
        "--wait",
        "wait_s",
        metavar="SECONDS",
        type=seconds,
        help=f"{summary} (default: scheduler.drain_s).",
    )


@click.command(cls=Command)
@click.option("--off", is_flag=True, help="Accept new requests again.")
@wait_option("How long to wait until no request is open; 0: do not wait")
@settings_options
def drain(sources: SettingSources, *, off: bool, wait_s: float | None) -> int:
    """Refuse new requests and let running ones finish."""
    config, console = running_config(sources), Console(sys.stdout)
    try:
        if off:
            with contextlib.closing(_open(config, is_on=False)) as watch:
                _confirmed(config, watch, is_on=False)
            console.print_line("New requests are accepted again.")
            code = limits.EXIT_OK
        else:
            longest_s = config.scheduler.drain_s if wait_s is None else wait_s
            with contextlib.closing(OperatorDrain(config, console)) as ordered:
                ordered.begin()
                console.print_line("New requests are refused until `lockstep drain --off`.")
                count = ordered.wait(longest_s)
            # With a wait of 0 s, open requests are no failure.
            code = limits.EXIT_UNAVAILABLE if count and longest_s else limits.EXIT_OK
    finally:
        console.show_progress("")
    return exit_code_if_written(code, console.write_error)


class OperatorDrain:
    """Drain of a running scheduler; as a context it begins at its start, and errors undo it."""

    def __init__(self, config: Config, console: Console) -> None:
        """Prepare; nothing is sent.

        Args:
            config: contains the scheduler's address.
            console: shows the progress.
        """
        self._config = config
        self._console = console
        self._watch: StatusWatch | None = None
        self._status: StatusReported | None = None

    def begin(self) -> None:
        """Have new requests refused.

        Raises:
            UnavailableError: when the scheduler does not answer.
        """
        self._watch = _open(self._config, is_on=True)
        try:
            self._status = _confirmed(self._config, self._watch, is_on=True)
        except BaseException:
            self.close()
            raise

    def wait(self, wait_s: float) -> int:
        """Wait until no request is open; return the number of open ones.

        Args:
            wait_s: longest wait in seconds.
        """
        assert self._watch is not None
        assert self._status is not None
        clock = SystemClock()
        until_s, status = clock.now() + wait_s, self._status
        while count := status.running + status.waiting:
            words = (
                f"{count} request{'s are' if count > 1 else ' is'} open "
                f"({status.running} running, {status.waiting} waiting)"
            )
            left_s = until_s - clock.now()
            if left_s <= 0.0:
                self._console.show_progress("")
                self._console.print_line(f"{words}.")
                return count
            self._console.show_progress(f"Waiting: {words}")
            status = self._watch.poll(left_s) or status
        self._console.show_progress("")
        self._console.print_line("No request is open.")
        return 0

    def close(self) -> None:
        """Close the link; the drain continues."""
        if self._watch is not None:
            self._watch.close()

    def __enter__(self) -> Self:
        """Begin."""
        self.begin()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Close the link; undo the drain if the block failed."""
        self.close()
        if error is not None:
            # The error that made it necessary is the one to show.
            with (
                contextlib.closing(_open(self._config, is_on=False)) as watch,
                contextlib.suppress(UnavailableError),
            ):
                _confirmed(self._config, watch, is_on=False)


def _open(config: Config, *, is_on: bool) -> StatusWatch:
    order = OrderDrain(is_on=is_on)
    return StatusWatch(config, _STATUS_INTERVAL_S, identity="operator", order=order)


def _confirmed(config: Config, watch: StatusWatch, *, is_on: bool) -> StatusReported:
    """Return the first status that shows that the scheduler drains, or no longer drains."""
    clock = SystemClock()
    until_s = clock.now() + ANSWER_DEADLINE_S
    latest: StatusReported | None = None
    while (left_s := until_s - clock.now()) > 0.0:
        latest = watch.poll(left_s) or latest
        if latest is not None and latest.draining == is_on:
            return latest
    if latest is None:
        raise no_answer_error(config, watch.refusal)
    raise UnavailableError(
        "The scheduler does not drain: see its log for the reason."
        if is_on
        else "The scheduler still drains because it is stopping, which cannot be cancelled."
    )
