"""Plan and running processes of the cache benchmark. Sends requests; does not choose them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from services.commands.bench.load.load_processes import closed_loop_order, require_success
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.processes import MeasuredProcess
from services.commands.bench.measuring.stack import Stack
from services.commands.bench.serving.peers import PeerServer


class CachePlan(Struct, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench cache`, from its command line."""

    model: Path
    ranks: int
    parts: list[str]
    prefixes: list[int]
    """Lengths of shared prefixes in tokens."""
    turns: int
    """Requests of the replayed session."""
    tokens: int
    """Tokens of the session's last request."""
    repeats: int
    log_folder: Path
    directory: Path | None = None
    """Folder in which the temporary folders of stored blocks are made; None: the system's."""
    tries: int = 1
    """Largest number of measurements per repeat while other processes use the machine."""
    is_warm: bool = False
    """Keep stored blocks in the page cache, so that restores and plain reads use memory."""
    settings: dict[str, str] = {}
    """LOCKSTEP_… variables for every stack."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheTestbed:
    """The plan, and the load client, peer server and block folder that all parts share."""

    plan: CachePlan
    prompts: PromptGenerator
    client: MeasuredProcess
    peer: PeerServer
    folder: Path
    """Folder of stored blocks, removed at the end."""

    def start(self, name: str, blocks: Path, **settings: str) -> Stack:
        """Start a stack with the plan's model and ranks; return it when its gateway is ready.

        Args:
            name: part of the log's file name.
            blocks: folder for the stack's stored blocks.
            settings: keys of the section `cache` and their values.

        Raises:
            UnavailableError: when the stack does not become ready.
        """
        cache = {f"LOCKSTEP_CACHE_{key.upper()}": value for key, value in settings.items()}
        return Stack(
            self.plan.model,
            self.plan.ranks,
            self.plan.log_folder / f"lockstep-{name}.log",
            {**self.plan.settings, "LOCKSTEP_CACHE_DIRECTORY": str(blocks), **cache},
        )

    def request(self, port: int, path: str, bodies: list[dict[str, Any]]) -> dict[str, Any]:
        """Send each body from a client of its own, all at once; return the load client's answer.

        Args:
            port: the server's port on this machine.
            path: path of the endpoint.
            bodies: JSON bodies of the requests.

        Raises:
            UnavailableError: when a request fails.
        """
        order = closed_loop_order(port, path, [[body] for body in bodies])
        return require_success(self.client.request(order))


def restore_rate(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return the rate at which restores read blocks between two readings of the counters.

    Args:
        before: the scheduler's counters at the beginning.
        after: the same counters at the end.

    Returns:
        Bytes per second of the time that restores took; None when nothing was restored or the
        scheduler does not count it.
    """

    def increase(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    read, took_ms = increase("cache_restore_bytes_total"), increase("cache_restore_ms_total")
    return read / took_ms * 1_000 if read > 0.0 and took_ms > 0.0 else None
