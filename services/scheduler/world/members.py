"""Rank processes. Owns what the world knows of each and which becomes which rank. Pure."""

import dataclasses
from collections.abc import Iterable
from typing import Literal

from shared.identifiers import PeerId
from shared.messages import RankFailed, RankHello, RankReady, RankStatus


@dataclasses.dataclass(slots=True)
class RankProcess:
    """A process that has sent RankHello and has a rank in the current epoch, or waits for one."""

    peer: PeerId
    hello: RankHello
    rank: int | None = None
    """Its rank in the current epoch; None: it waits for one."""
    state: Literal["joining", "loading", "ready"] = "joining"
    is_in_init: bool = False
    """It has reported that it is inside MLX's init, and nothing since."""
    loaded: float = 0.0
    """Part of the model that it has loaded, 0 to 1."""
    ready: RankReady | None = None
    memory_bytes: int = 0

    def describe(self) -> str:
        """Return its rank and machine, such as "rank 1 on mac2"; it must have a rank."""
        return f"rank {self.rank} on {self.hello.host}" if self.hello.host else f"rank {self.rank}"

    def status(self) -> RankStatus:
        """Return this process's entry in the status report; it must have a rank."""
        return RankStatus(
            rank=self.rank or 0,
            state=self.state,
            host=self.hello.host,
            pid=self.hello.pid,
            device=self.hello.device,
            blas=self.ready.blas if self.ready else "",
            mlx_version=self.hello.mlx_version,
            loaded=self.loaded,
            memory_bytes=self.memory_bytes,
            shard_bytes=self.ready.shard_bytes if self.ready else 0,
            share=self.ready.share if self.ready else "",
            layers=self.ready.layers if self.ready else "",
            canary=self.ready.canary if self.ready else [],
        )


def assign_ranks(idle: Iterable[RankProcess], size: int) -> list[RankProcess] | None:
    """Choose a process for each rank; None if there are too few.

    A process that was started as a certain rank becomes that rank; the other ranks are filled in
    order of arrival.

    Args:
        idle: processes without a rank, in order of arrival.
        size: number of ranks.

    Returns:
        The processes in rank order, or None.
    """
    chosen: dict[int, RankProcess] = {}
    free: list[RankProcess] = []
    for member in idle:
        # A later process with the same rank replaces an earlier one, whose link will be lost.
        if 0 <= member.hello.rank < size:
            chosen[member.hello.rank] = member
        elif member.hello.rank < 0:
            free.append(member)
    missing = [rank for rank in range(size) if rank not in chosen]
    if len(free) < len(missing):
        return None
    chosen.update(zip(missing, free, strict=False))
    return [chosen[rank] for rank in range(size)]


def replaces(new: RankHello, old: RankHello) -> bool:
    """Tell whether a new process has the rank and host of an old one, which must have ended."""
    return new.rank == old.rank >= 0 and new.host == old.host and new.pid != old.pid


def is_same_process(new: RankHello, old: RankHello) -> bool:
    """Tell whether two hellos come from one process that has reconnected.

    Machines may share a name and process ids, so all fields must be equal. A process that sends a
    hello has no rank, even if it had one over its earlier connection.
    """
    return new == old


def explain_failure(rank: int | None, message: RankFailed) -> str:
    """Return a sentence about a report of failure.

    Args:
        rank: of the process that has failed; None: it has no rank now.
        message: its report.
    """
    return f"{'A rank' if rank is None else f'Rank {rank}'} failed: {message.detail}"
