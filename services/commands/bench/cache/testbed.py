"""What the parts of the cache benchmark share: the plan, who is asked, and one request."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.processes import MeasuredProcess
from services.commands.bench.measuring.stack import Stack
from services.commands.bench.serving.peers import PeerServer
from shared.errors import UnavailableError

TIMEOUT_S = 900.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class CachePlan(Struct, frozen=True, kw_only=True):
    """What to measure."""

    model: Path
    ranks: int
    parts: list[str]
    prefixes: list[int]
    """Lengths of shared prefixes in tokens."""
    turns: int
    """Requests of the replayed session."""
    tokens: int
    """Tokens of its last request."""
    repeats: int
    log_folder: Path
    directory: Path | None = None
    """Where the temporary folders of stored blocks are made; None: the system's."""
    tries: int = 1
    """Measurements of one repeat while others use the machine."""
    is_warm: bool = False
    """Stored blocks stay in the system's page cache, from which they and plain reads come then."""
    settings: dict[str, str] = {}
    """LOCKSTEP_… variables for every stack."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheTestbed:
    """What runs during all parts."""

    plan: CachePlan
    prompts: PromptGenerator
    client: MeasuredProcess
    peer: PeerServer
    folder: Path
    """For stored blocks; removed at the end."""

    def start(self, name: str, blocks: Path, **settings: str) -> Stack:
        """Start a stack.

        Args:
            name: of its log.
            blocks: folder for its stored blocks.
            settings: keys of the section `cache` and their values.
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

        Raises:
            UnavailableError: a request failed.
        """
        answer = self.client.request(
            {
                "host": "127.0.0.1",
                "port": port,
                "path": path,
                "clients": [[body] for body in bodies],
                "timeout_s": TIMEOUT_S,
            }
        )
        if answer["problems"]:
            raise UnavailableError(f"Requests failed: {answer['problems'][0]}")
        return answer


def body(model: str, new_tokens: int, **prompt: Any) -> dict[str, Any]:
    """Return a greedy streamed request that every server understands."""
    return {
        "model": model,
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **prompt,
    }


def restore_rate(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return bytes per second that restores read between two looks at the scheduler's counters.

    None: nothing was restored, or the scheduler does not count it.
    """

    def increase(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    read, took_ms = increase("cache_restore_bytes_total"), increase("cache_restore_ms_total")
    return read / took_ms * 1_000 if read > 0.0 and took_ms > 0.0 else None
