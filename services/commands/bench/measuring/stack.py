"""A whole running Lockstep, started with `lockstep up` on a free port and its own run folder."""

import functools
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from services.commands.bench.measuring import machine
from services.commands.bench.measuring.processes import (
    LOCKSTEP_COMMAND,
    MeasuredProcess,
    free_port,
    get_json,
    wait_until_ready,
)
from shared.errors import UnavailableError
from shared.messages import DraftStatistics

STATUS_PATH = "/v1/lockstep/status"
_STATUS_AGE_S = 1.2
"""Longest age of the scheduler's counters at the gateway, which receives them once a second."""


class Stack:
    """All processes of one `lockstep up`; as a context manager, it stops them at its end."""

    def __init__(
        self, model: Path, ranks: int, log: Path, settings: dict[str, str] | None = None
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
        self.port = free_port()
        self.name = model.name
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-bench-")
        self._child = MeasuredProcess(
            "lockstep up",
            [
                *LOCKSTEP_COMMAND,
                "up",
                "--model",
                str(model),
                "--ranks",
                str(ranks),
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
            ],
            log,
            environment(self._folder.name, self.name, settings or {}),
        )
        try:
            find_failure = functools.partial(failure_reason, self.port)
            wait_until_ready(self._child, self.port, "/readyz", 900.0, find_failure)
            self._roles = machine.role_pids(self._child.pid)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop all processes."""
        self._child.stop(wait_s=40.0)
        self._folder.cleanup()

    def cpu_seconds(self) -> dict[str, float]:
        """Return role -> CPU seconds (user plus system) of its processes since their start."""
        return machine.role_cpu_seconds(self._roles)

    def resident_mib(self) -> dict[str, float]:
        """Return role -> resident memory of its processes together, in MiB."""
        return machine.role_resident_mib(self._roles)

    def counters(self) -> dict[str, float]:
        """Return the scheduler's counters by name, after a wait that lets them become current.

        The wait of 1.2 s is needed because the gateway receives them once a second.

        Raises:
            UnavailableError: when the gateway does not answer.
        """
        time.sleep(_STATUS_AGE_S)
        return find_counters(self.status())

    def drafts(self) -> list[DraftStatistics]:
        """Return the counts of drafts since the scheduler's start, one entry per drafting method.

        Waits 1.2 s first, because the gateway receives them once a second.

        Raises:
            UnavailableError: when the gateway does not answer.
        """
        time.sleep(_STATUS_AGE_S)
        world = self.status().get("scheduler") or {}
        return msgspec.convert(world.get("drafts", []), list[DraftStatistics])

    def status(self) -> dict[str, Any]:
        """Return the JSON body of the gateway's status endpoint, `/v1/lockstep/status`.

        Raises:
            UnavailableError: when the gateway does not answer 200.
        """
        code, body = get_json(self.port, STATUS_PATH)
        if code != 200 or not isinstance(body, dict):
            raise UnavailableError(f"{STATUS_PATH} answered {code}.")
        return body

    def describe(self) -> dict[str, Any]:
        """Return facts about the ranks for a report.

        Returns:
            ranks: their number; rank_device and rank_blas: device and matrix library of rank 0, ""
            when unknown.

        Raises:
            UnavailableError: when the gateway does not answer 200.
        """
        world = self.status().get("scheduler") or {}
        ranks = world.get("ranks") or [{}]
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


def find_counters(status: Any) -> dict[str, float]:
    """Return the scheduler's counters that a status document contains.

    Args:
        status: parsed JSON of the status endpoint, or any part of it.

    Returns:
        Counter -> value, from the first object named "counters" at any depth, or {}.
    """
    if isinstance(status, dict):
        counters = status.get("counters")
        if isinstance(counters, dict):
            return {key: float(value) for key, value in counters.items()}
        for value in status.values():
            found = find_counters(value)
            if found:
                return found
    return {}


def per_step_metrics(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the mean time per step, in microseconds, of each counter that sums times.

    Args:
        before: the scheduler's counters at the beginning.
        after: the same counters at the end.

    Returns:
        "steps", the number of steps between the two readings, and `x_us_per_step` for every counter
        `x_ms_total` or `x_seconds_total`; {} when there was no step.
    """
    steps = next(
        (
            after[name] - before.get(name, 0.0)
            for name in after
            if name.removeprefix("lockstep_") in ("steps_total", "steps_finished_total")
        ),
        0.0,
    )
    if steps <= 0:
        return {}
    values = {"steps": steps}
    for name, value in after.items():
        increase = value - before.get(name, 0.0)
        if name.endswith("_ms_total"):
            short = name.removeprefix("lockstep_").removesuffix("_ms_total")
            values[f"{short}_us_per_step"] = increase * 1_000 / steps
        elif name.endswith("_seconds_total"):
            short = name.removeprefix("lockstep_").removesuffix("_seconds_total")
            values[f"{short}_us_per_step"] = increase * 1e6 / steps
    return values
