"""The whole stack as users start it: `lockstep up` on a free port with its own run folder."""

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
"""The gateway learns the scheduler's counters once a second."""


class Stack:
    """A running Lockstep. Use as a context manager."""

    def __init__(
        self, model: Path, ranks: int, log: Path, settings: dict[str, str] | None = None
    ) -> None:
        """Start it and wait until it is ready.

        Args:
            model: folder.
            ranks: world size.
            log: file for what all its processes say.
            settings: LOCKSTEP_… variables. Stored blocks go to a temporary folder unless they say
                otherwise.

        Raises:
            UnavailableError: it does not become ready.
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
            given_up = functools.partial(failure_reason, self.port)
            wait_until_ready(self._child, self.port, "/readyz", 900.0, given_up)
            self._roles = machine.role_pids(self._child.pid)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop all its processes."""
        self._child.stop(wait_s=40.0)
        self._folder.cleanup()

    def cpu_seconds(self) -> dict[str, float]:
        """Return role -> CPU seconds so far."""
        return machine.role_cpu_seconds(self._roles)

    def resident_mib(self) -> dict[str, float]:
        """Return role -> resident memory in MiB."""
        return machine.role_resident_mib(self._roles)

    def counters(self) -> dict[str, float]:
        """Return the scheduler's counters, waiting until they are fresh; {} without any.

        Raises:
            UnavailableError: the gateway does not answer.
        """
        time.sleep(_STATUS_AGE_S)
        return find_counters(self.status())

    def drafts(self) -> list[DraftStatistics]:
        """Return the scheduler's counts of drafts by method, waiting until they are fresh.

        Raises:
            UnavailableError: the gateway does not answer.
        """
        time.sleep(_STATUS_AGE_S)
        world = self.status().get("scheduler") or {}
        return msgspec.convert(world.get("drafts", []), list[DraftStatistics])

    def status(self) -> dict[str, Any]:
        """Return what the gateway says of the world.

        Raises:
            UnavailableError: it does not answer.
        """
        code, body = get_json(self.port, STATUS_PATH)
        if code != 200 or not isinstance(body, dict):
            raise UnavailableError(f"{STATUS_PATH} answered {code}.")
        return body

    def about(self) -> dict[str, Any]:
        """Return device and matrix library of the ranks."""
        world = self.status().get("scheduler") or {}
        ranks = world.get("ranks") or [{}]
        return {
            "ranks": len(ranks),
            "rank_device": ranks[0].get("device", ""),
            "rank_blas": ranks[0].get("blas", ""),
        }


def environment(folder: str, served_name: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return a stack's variables: it leaves nothing outside of `folder` unless settings say so."""
    return {
        "LOCKSTEP_PATHS_RUN_DIR": folder,
        "LOCKSTEP_CACHE_DIRECTORY": f"{folder}/blocks",
        "LOCKSTEP_MODEL_SERVED_NAME": served_name,
        "HF_HUB_OFFLINE": "1",
        **settings,
    }


def failure_reason(port: int) -> str:
    """Return why the world of this gateway tries no further epoch; "" while nobody says so."""
    _, body = get_json(port, STATUS_PATH)
    world = body.get("scheduler") if isinstance(body, dict) else None
    return str(world.get("reason")) if isinstance(world, dict) and world.get("failure") else ""


def find_counters(status: Any) -> dict[str, float]:
    """Return the first map named "counters" in a status document, however deep; {} without."""
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
    """Return each counter's increase divided by the steps done between; {} when no step was.

    A counter of milliseconds `x_ms_total` becomes `x_us_per_step`.
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
