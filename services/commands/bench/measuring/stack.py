"""A whole running Lockstep, started with `lockstep up` on a free port and its own run folder."""

import contextlib
import functools
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.commands.bench.measuring import machine
from services.commands.bench.measuring.plan import StackPlan
from services.commands.bench.measuring.processes import (
    LOCKSTEP_COMMAND,
    MeasuredServer,
    free_port,
    get_json,
    wait_until_ready,
)
from services.commands.bench.measuring.report import Report
from shared.configuration.loading import API_KEYS_VARIABLE, load_config
from shared.errors import UnavailableError
from shared.messages import DraftStatistics

STATUS_PATH = "/v1/lockstep/status"
_STATUS_AGE_S = 1.2
"""Longest age of the scheduler's counters at the gateway, which receives them once a second."""


class Stack(MeasuredServer):
    """All processes of one `lockstep up`."""

    def __init__(
        self, model: Path, ranks: int, log: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        """Start all processes and wait until the gateway is ready.

        Args:
            model: the model's folder.
            ranks: world size.
            log: file for the output of all processes.
            settings: LOCKSTEP_… variables. Blocks are stored in a temporary folder unless a
                variable names another one.

        Raises:
            UnavailableError: when the gateway does not become ready.
        """
        port = free_port()
        first_key = (settings or {}).get(API_KEYS_VARIABLE, "").partition(",")[0]
        self._api_key = first_key.partition("=")[2]
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-bench-")
        command = [
            *[*LOCKSTEP_COMMAND, "up", "--model", str(model), "--ranks", str(ranks)],
            *["--host", "127.0.0.1", "--port", str(port)],
        ]
        variables = environment(self._folder.name, model.name, settings or {})
        self.config = load_config(environment=variables)
        """Its settings, except those on its command line: model, ranks, host and port."""
        super().__init__("lockstep up", command, log, variables, port=port, model=model.name)
        try:
            find_failure = functools.partial(failure_reason, port)
            wait_until_ready(self, port, "/readyz", 900.0, find_failure)
            self._roles = machine.role_pids(self.pid)
        except BaseException:
            self.stop()
            raise

    def stop(self, wait_s: float = 40.0) -> None:
        """Stop all processes and remove their temporary folder, as MeasuredProcess does."""
        super().stop(wait_s)
        self._folder.cleanup()

    def cpu_seconds(self) -> dict[str, float]:
        """Return role -> CPU seconds (user plus system) of its processes since their start."""
        return {role: sum(map(machine.cpu_seconds, pids)) for role, pids in self._roles.items()}

    def gateway_memory(self) -> dict[str, float]:
        """Return gateway_mib, the gateway's resident memory in MiB; {} without a gateway."""
        pids = self._roles.get("gateway", [])
        return {"gateway_mib": sum(map(machine.resident_mib, pids))} if pids else {}

    def world(self) -> dict[str, Any]:
        """Return the scheduler's part of the gateway's status, which is 1.2 s old at most.

        Returns:
            The object "scheduler" of `/v1/lockstep/status`; {} when the gateway has none.

        Raises:
            UnavailableError: when the gateway does not answer 200.
        """
        code, body = get_json(self.port, STATUS_PATH, api_key=self._api_key)
        if code != 200 or not isinstance(body, dict):
            raise UnavailableError(f"{STATUS_PATH} answered {code}.")
        return body.get("scheduler") or {}

    def ranks(self) -> list[dict[str, Any]]:
        """Return the ranks' objects in the status, in rank order; [] when it has none.

        Raises:
            UnavailableError: when the gateway does not answer 200.
        """
        return self.world().get("ranks") or []

    def wait_for_status(self) -> None:
        """Wait 1.2 s, so that the status covers all that happened before."""
        time.sleep(_STATUS_AGE_S)

    def counters(self) -> dict[str, float]:
        """Return the scheduler's counters by name, after `wait_for_status`.

        Raises:
            UnavailableError: when the gateway does not answer 200.
        """
        self.wait_for_status()
        return self.world().get("counters") or {}

    def drafts(self) -> list[DraftStatistics]:
        """Return the counts of drafts since the scheduler's start, one entry per drafting method.

        Calls `wait_for_status` first.

        Raises:
            UnavailableError: when the gateway does not answer 200.
        """
        self.wait_for_status()
        return msgspec.convert(self.world().get("drafts", []), list[DraftStatistics])

    def describe(self) -> dict[str, Any]:
        """Return facts about the ranks for a report.

        Returns:
            ranks: their number; rank_device and rank_blas: device and matrix library of rank 0, ""
            when unknown.

        Raises:
            UnavailableError: when the gateway does not answer 200.
        """
        ranks = self.ranks() or [{}]
        return {
            "ranks": len(ranks),
            "rank_device": ranks[0].get("device", ""),
            "rank_blas": ranks[0].get("blas", ""),
        }


def environment(folder: str, served_name: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a stack that writes only into one folder.

    Args:
        folder: for its run files and stored blocks.
        served_name: name of the model in requests.
        settings: LOCKSTEP_… variables, which override the others.
    """
    return {
        "LOCKSTEP_PATHS_RUN_DIR": folder,
        "LOCKSTEP_CACHE_DIRECTORY": f"{folder}/blocks",
        "LOCKSTEP_MODEL_SERVED_NAME": served_name,
        "HF_HUB_OFFLINE": "1",
        **settings,
    }


def failure_reason(port: int) -> str:
    """Return the reason for which the scheduler has given up starting epochs.

    Args:
        port: the gateway's port on this machine.

    Returns:
        "" while the scheduler has not given up, and when the gateway does not answer.
    """
    _, body = get_json(port, STATUS_PATH)
    world = body.get("scheduler") if isinstance(body, dict) else None
    return str(world.get("reason")) if isinstance(world, dict) and world.get("failure") else ""


@contextlib.contextmanager
def started_stack(plan: StackPlan, report: Report, **settings: str) -> Iterator[Stack]:
    """Start the stack of a plan, describe its ranks in the report, and stop it at the end.

    Args:
        plan: model, ranks and settings of the stack, and the folder of its log.
        report: receives the facts of `Stack.describe` about its machine.
        settings: further LOCKSTEP_… variables; those of the plan override them.

    Raises:
        UnavailableError: when the gateway does not become ready.
    """
    log = plan.log_folder / "lockstep.log"
    with Stack(plan.model, plan.ranks, log, {**settings, **plan.settings}) as stack:
        report.machine |= stack.describe()
        yield stack


def per_step_metrics(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the mean time per step, in microseconds, of each counter that sums times.

    Args:
        before: the scheduler's counters at the beginning.
        after: the same counters at the end.

    Returns:
        "steps", the number of steps between the two readings, and `x_us_per_step` for every counter
        `x_ms_total`; {} when there was no step.
    """
    increases = {name: value - before.get(name, 0.0) for name, value in after.items()}
    steps = increases.get("steps_total", 0.0)
    if steps <= 0:
        return {}
    times_us = {
        f"{name.removesuffix('_ms_total')}_us_per_step": milliseconds * 1_000 / steps
        for name, milliseconds in increases.items()
        if name.endswith("_ms_total")
    }
    return {"steps": steps, **times_us}
