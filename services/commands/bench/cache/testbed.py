"""Plan and running processes of the cache benchmark. Starts stacks; sends no requests."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from services.commands.bench.load.load_processes import LoadClient
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.plan import StackPlan
from services.commands.bench.measuring.stack import Stack
from services.commands.bench.serving.peers import PeerServer


class CachePlan(StackPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench cache`, from its command line."""

    parts: list[str]
    prefixes: list[int]
    """Lengths of shared prefixes in tokens."""
    turns: int
    """Requests of the replayed session."""
    tokens: int
    """Tokens of the session's last request."""
    directory: Path | None = None
    """Folder in which the temporary folders of stored blocks are made; None: the system's."""
    is_warm: bool = False
    """Keep stored blocks in the page cache, so that restores and plain reads use memory."""

    def repeats_for(self, tokens: int, long_tokens: int) -> int:
        """Return the number of repeats of a case; long cases get a third of them.

        Args:
            tokens: tokens of the case.
            long_tokens: largest number of tokens of a case that is not long.
        """
        return self.repeats if tokens <= long_tokens else max(1, self.repeats // 3)


@dataclasses.dataclass(frozen=True, slots=True)
class CacheTestbed:
    """The plan, and the load client, peer server and block folder that all parts share."""

    plan: CachePlan
    prompts: PromptGenerator
    client: LoadClient
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

    @contextlib.contextmanager
    def running_peer(self) -> Iterator[PeerServer]:
        """Let the peer run until the end of the context; it is paused otherwise."""
        self.peer.resume()
        try:
            yield self.peer
        finally:
            self.peer.pause()

    @contextlib.contextmanager
    def contenders(
        self, name: str, folder: Path, setting: str, values: Mapping[str, str]
    ) -> Iterator[dict[str, Stack]]:
        """Start a stack per contender, in order; stop them at the end.

        Args:
            name: part of the logs' file names.
            folder: gets a folder per stack for its stored blocks.
            setting: key of the section `cache` in which the contenders differ.
            values: contender -> value of the setting.

        Raises:
            UnavailableError: when a stack does not become ready.
        """
        with contextlib.ExitStack() as cleanup:
            stacks = {}
            for contender, value in values.items():
                blocks = folder / value
                blocks.mkdir(parents=True)
                stack = self.start(f"{name}-{value}", blocks, **{setting: value})
                stacks[contender] = cleanup.enter_context(stack)
            yield stacks


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
