"""Announcements of `lockstep up` about the world. Owns which changes are announced, and when."""

import os
from collections.abc import Callable, Sequence

from services.supervisor.console.console import Console
from services.supervisor.status import progress_text
from shared.configuration.host_share import HostShare
from shared.configuration.loading import API_KEYS_VARIABLE
from shared.messages import StatusReported

NO_STATUS_S = 3.0
"""Seconds without a status after which a scheduler on another host is announced as awaited."""


class Announcer:
    """Writer of lines to the console about changes of the world between two status reports."""

    def __init__(self, share: HostShare, console: Console) -> None:
        self._share = share
        self._config = share.config
        self._console = console
        self._ready_world = (0, 0)
        """(number of the scheduler process, epoch) of the world last announced as ready."""
        self._failed_start = 0
        self._is_draining = False
        self._refusal = ""
        self._is_waiting = False

    def announce_start(self) -> None:
        """Write the line that names the model, ranks and backend that are about to start."""
        size = self._config.world.size
        where = f" on {self._share.name}" if self._share.name else ""
        self._console.print_line(
            f"Starting Lockstep{where}: {self._config.served_name}, "
            f"{_ranks(self._share.roles.ranks, size)} ({self._config.backend}). Ctrl-C stops it."
        )

    def announce(
        self, status: StatusReported, start: int, *, is_gateway_ready: Callable[[], bool]
    ) -> None:
        """Write lines about changes since the last status: draining, failure, loading, readiness.

        Args:
            status: the scheduler's report.
            start: number of the scheduler process, counted from 1; each process counts epochs from
                1.
            is_gateway_ready: asks the gateway and returns its answer; True on a host without one.
        """
        self._refusal = ""
        if self._is_waiting:
            self._is_waiting = False
            self._console.show_progress("")
        self._announce_draining(status)
        world = (start, status.epoch)
        if status.failure:
            self._announce_failure(status, start)
        elif not progress_text.is_loaded(status):
            line = progress_text.loading_line(status, with_bar=self._console.is_terminal)
            self._console.show_progress(line)
        elif status.ready and world != self._ready_world and is_gateway_ready():
            is_first = self._ready_world == (0, 0)
            self._ready_world = world
            self._console.show_progress("")
            if is_first and not self._share.roles.gateway:
                ranks = _ranks(self._share.roles.ranks, self._config.world.size)
                self._console.print_line(
                    f"\nLockstep is ready; {self._share.name} runs {ranks}. Clients use a host "
                    "with a gateway.\n"
                )
            elif is_first:
                self._console.print_line(f"\n{progress_text.ready_line(self._config, status)}\n")
                has_keys = self._config.gateway.api_keys_file or os.environ.get(API_KEYS_VARIABLE)
                curl = progress_text.curl_line(self._config, needs_key=bool(has_keys))
                self._console.print_line(f"{curl}\n")
            else:
                self._console.log_line(f"ready again (epoch {status.epoch})")

    def announce_no_status(self, refusal: str, for_s: float) -> None:
        """Write why the scheduler does not report: a refused handshake, or no answer.

        A refusal is written once. The progress line shows the wait after `NO_STATUS_S`, on hosts
        without a scheduler of their own.

        Args:
            refusal: cause of the failed handshake; "" if none failed.
            for_s: seconds since the latest status, or since the start.
        """
        address = self._config.gateway_address
        if refusal and refusal != self._refusal:
            self._refusal = refusal
            self._console.log_line(
                f"the handshake with {address} failed: {refusal}; see `lockstep keys show` here "
                "and on the scheduler's host",
                "error",
            )
        if for_s >= NO_STATUS_S and not self._share.roles.scheduler:
            self._is_waiting = True
            self._console.show_progress(f"Waiting for the scheduler at {address}")

    def _announce_draining(self, status: StatusReported) -> None:
        if status.draining == self._is_draining:
            return
        self._is_draining = status.draining
        self._console.show_progress("")
        self._console.log_line(
            "draining: new requests are refused until `lockstep drain --off`"
            if status.draining
            else "accepting new requests again",
        )

    def _announce_failure(self, status: StatusReported, start: int) -> None:
        if self._failed_start == start:
            return
        self._failed_start = start
        self._console.show_progress("")
        self._console.log_line(status.reason, "error")
        self._console.log_line(
            "no further start is tried; after repairing the cause run `lockstep restart scheduler`"
            if status.failure == "epochs"
            else "cannot run with this configuration: stopping everything",
            "error",
        )


def _ranks(here: Sequence[int], size: int) -> str:
    if len(here) == size:
        return f"{size} rank{'s' if size > 1 else ''}"
    if not here:
        return f"none of {size} rank{'s' if size > 1 else ''}"
    return f"rank{'s' if len(here) > 1 else ''} {', '.join(map(str, here))} of {size}"
