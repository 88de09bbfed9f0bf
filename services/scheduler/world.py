"""The ranks and the epoch: rendezvous, loading, readiness, and what ends an epoch. Pure.

An epoch is one life of the world. It begins when enough rank processes have said hello, and ends
with the first of them that is lost, fails, or differs. A process serves one epoch only (MLX's
groups cannot be rebuilt), so every rank of an ended epoch must come back as a new process.
"""

import dataclasses
from enum import Enum
from typing import Literal

from services.scheduler.environment import world_environment
from services.scheduler.events import Action, Say, SendToRanks
from services.scheduler.rows import RowBudget
from shared import limits
from shared.identifiers import Epoch, PeerId
from shared.messages import (
    JoinWorld,
    LeaveWorld,
    RankFailed,
    RankHello,
    RankLoading,
    RankReady,
    RankStatus,
)
from shared.settings import Config


class WorldState(Enum):
    """What the world is doing."""

    GATHERING = "gathering"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    """Starting again cannot help; an operator must."""


@dataclasses.dataclass(slots=True)
class _Member:
    """One rank process."""

    peer: PeerId
    hello: RankHello
    rank: int | None = None
    state: Literal["joining", "loading", "ready"] = "joining"
    loaded: float = 0.0
    ready: RankReady | None = None
    memory_bytes: int = 0


class World:
    """Ranks by peer; at most one epoch at a time."""

    def __init__(self, config: Config, jaccl_devices: str, out: list[Action]) -> None:
        """Start with no ranks.

        Args:
            config: the whole configuration.
            jaccl_devices: content of the device matrix, "" when the backend is another.
            out: where actions go.
        """
        self.state = WorldState.GATHERING
        self.epoch = Epoch(0)
        self.failure = ""
        self.was_ready = False
        self._config = config
        self._jaccl_devices = jaccl_devices
        self._out = out
        self._members: dict[PeerId, _Member] = {}
        self._started_at_s = 0.0
        self._now_s = 0.0
        self._vocab_size = 0

    @property
    def size(self) -> int:
        """Ranks that the world needs."""
        return self._config.world.size

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The ranks of this epoch, in rank order."""
        ranked = [member for member in self._members.values() if member.rank is not None]
        return tuple(member.peer for member in sorted(ranked, key=lambda m: m.rank or 0))

    def rank_of(self, peer: PeerId) -> int | None:
        """Return the rank of a peer in this epoch, or None when it belongs to none."""
        member = self._members.get(peer)
        return member.rank if member else None

    def host_of(self, peer: PeerId) -> str:
        """Return the machine on which a rank runs; "" for somebody unknown."""
        member = self._members.get(peer)
        return member.hello.host if member else ""

    def hello(self, peer: PeerId, message: RankHello, now_s: float) -> str | None:
        """A rank process is there. With enough of them an epoch begins.

        Returns:
            Why the present epoch cannot go on, or None.
        """
        known = self._members.get(peer)
        if known is not None and known.rank is not None:
            return None
        self._members[peer] = _Member(peer, message)
        for member in self._members.values():
            if member.rank is not None and _replaces(message, member.hello):
                return f"Rank {member.rank} was started again (process {message.pid})."
        if self.state is WorldState.GATHERING:
            self._try_to_begin(now_s)
        return None

    def loading(self, peer: PeerId, message: RankLoading) -> None:
        """A rank reports how far it is."""
        member = self._members.get(peer)
        if member is not None and member.rank is not None and member.state != "ready":
            member.state = "loading" if message.stage != "joining" else "joining"
            member.loaded = message.loaded

    def ready(self, peer: PeerId, message: RankReady) -> str | None:
        """A rank has loaded. Returns why the epoch cannot go on, or None.

        When the last one is ready, `state` becomes READY.
        """
        member = self._members.get(peer)
        if self.state is not WorldState.LOADING or member is None or member.rank is None:
            return None
        member.ready = message
        member.state = "ready"
        member.loaded = 1.0
        reports = self.reports()
        if len({report.model_fingerprint for report in reports}) > 1:
            return "The ranks have loaded different models: compare their model folders."
        if len(reports) == self.size:
            self.state = WorldState.READY
            self.was_ready = True
            self._say("info", "world_ready", seconds=round(self._age_s(), 1))
        return None

    def lost(self, peer: PeerId) -> bool:
        """A rank process is gone; True when this ends the epoch."""
        member = self._members.pop(peer, None)
        return member is not None and member.rank is not None

    def failed(self, peer: PeerId, message: RankFailed) -> bool:
        """A rank says that it ends; True when this ends the epoch."""
        if message.permanent:
            self.failure = message.detail
        return self.lost(peer) or message.permanent

    def give_up(self, failure: str) -> None:
        """Starting again cannot help: `end` makes this state final."""
        self.failure = failure

    def overdue(self, now_s: float) -> str | None:
        """Return why loading has taken too long, or None."""
        self._now_s = now_s
        if self.state is not WorldState.LOADING:
            return None
        scheduler = self._config.scheduler
        joining = any(m.rank is not None and m.state == "joining" for m in self._members.values())
        if joining and self._age_s() > scheduler.init_deadline_s:
            return f"The ranks have not joined within {scheduler.init_deadline_s:.0f} s."
        if self._age_s() > scheduler.init_deadline_s + scheduler.load_deadline_s:
            return f"The ranks have not loaded within {scheduler.load_deadline_s:.0f} s."
        return None

    def end(self, cause: str, now_s: float) -> None:
        """End the epoch: its ranks are told to go, and those that come back form the next one."""
        self._now_s = now_s
        peers = self.peers
        self._say("warning", "epoch_ended", cause=cause)
        if peers:
            leave = LeaveWorld(epoch=self.epoch, detail=cause[:4_000])
            self._out.append(SendToRanks(peers, leave, self.epoch))
        for peer in peers:
            del self._members[peer]
        self.state = WorldState.FAILED if self.failure else WorldState.GATHERING
        if self.state is WorldState.GATHERING:
            self._try_to_begin(now_s)

    def reports(self) -> list[RankReady]:
        """Return what the ranks that have loaded say of themselves, in rank order."""
        ranked = [m for m in self._members.values() if m.rank is not None]
        ranked.sort(key=lambda member: member.rank or 0)
        return [member.ready for member in ranked if member.ready is not None]

    def budget(self) -> RowBudget:
        """Return what the poorest rank can hold."""
        reports = self.reports()
        poorest = min(reports, key=lambda r: r.kv_budget_bytes / max(1, r.kv_bytes_per_token))
        return RowBudget(
            poorest.kv_budget_bytes,
            max(report.kv_bytes_per_token for report in reports),
            max(report.kv_bytes_per_row for report in reports),
        )

    def context_tokens_max(self) -> int:
        """Return the longest sequence that the model was made for; 0 before the world is ready."""
        return min((report.context_tokens_max for report in self.reports()), default=0)

    def vocab_size(self) -> int:
        """Return how many token ids the model of the present or the last epoch has."""
        self._vocab_size = min((r.vocab_size for r in self.reports()), default=self._vocab_size)
        return self._vocab_size

    def fingerprint(self) -> str:
        """Return the model's fingerprint; "" before a rank has loaded."""
        return next((report.model_fingerprint for report in self.reports()), "")

    def note_memory(self, peer: PeerId, memory_bytes: int) -> None:
        """Remember what a rank said of its memory."""
        member = self._members.get(peer)
        if member is not None:
            member.memory_bytes = memory_bytes

    def explain(self) -> str:
        """Return why the world is not ready; "" when it is."""
        match self.state:
            case WorldState.READY:
                return ""
            case WorldState.FAILED:
                return self.failure
            case WorldState.LOADING:
                done = [
                    member.loaded for member in self._members.values() if member.rank is not None
                ]
                return f"The ranks are loading the model ({100 * min(done, default=0.0):.0f} %)."
            case WorldState.GATHERING:
                return f"{len(self._members)} of {self.size} ranks are there."

    def statuses(self) -> list[RankStatus]:
        """Describe every rank of the world, missing ones too."""
        by_rank = {m.rank: m for m in self._members.values() if m.rank is not None}
        return [_status(rank, by_rank.get(rank)) for rank in range(self.size)]

    def _try_to_begin(self, now_s: float) -> None:
        chosen = _assign([m for m in self._members.values() if m.rank is None], self.size)
        if chosen is None:
            return
        self.epoch = Epoch(self.epoch + 1)
        self.state = WorldState.LOADING
        self._started_at_s = self._now_s = now_s
        self._say("info", "epoch_begins", epoch=self.epoch, ranks=self.size)
        alike = len({(m.hello.device, m.hello.mlx_version) for m in chosen}) == 1
        addresses = [member.hello.data_address for member in chosen]
        for rank, member in enumerate(chosen):
            member.rank = rank
            join = self._join(rank, member.hello.launched, addresses, alike=alike)
            self._out.append(SendToRanks((member.peer,), join, self.epoch))

    def _join(self, rank: int, launched: bool, addresses: list[str], *, alike: bool) -> JoinWorld:
        config = self._config
        environment: dict[str, str] = {}
        files: dict[str, str] = {}
        if not launched:
            environment, files = world_environment(
                config.backend,
                rank,
                self.size,
                addresses,
                jaccl_devices_text=self._jaccl_devices,
                jaccl_coordinator=config.world.jaccl_coordinator,
            )
        wanted = config.world.receipt_logits
        return JoinWorld(
            epoch=self.epoch,
            rank=rank,
            world_size=self.size,
            backend=config.backend,
            environment=environment,
            files=files,
            synchronization=config.world.synchronization,
            receipt_logits=self.size > 1 and (wanted == "on" or (wanted == "auto" and alike)),
            init_deadline_s=config.scheduler.init_deadline_s,
            load_deadline_s=config.scheduler.load_deadline_s,
            step_deadline_max_s=limits.STEP_DEADLINE_MAX_S,
        )

    def _age_s(self) -> float:
        return self._now_s - self._started_at_s

    def _say(self, level: str, event: str, **fields: object) -> None:
        self._out.append(Say(level, event, {"epoch": self.epoch, **fields}))


def _assign(idle: list[_Member], size: int) -> list[_Member] | None:
    """Choose a process for each rank: those started as a rank first, then in order of arrival."""
    chosen: dict[int, _Member] = {}
    for member in idle:
        # A later process with the same rank replaces an earlier one that is about to be lost.
        if 0 <= member.hello.rank < size:
            chosen[member.hello.rank] = member
    free = iter([member for member in idle if member.hello.rank < 0])
    for rank in range(size):
        if rank not in chosen:
            substitute = next(free, None)
            if substitute is None:
                return None
            chosen[rank] = substitute
    return [chosen[rank] for rank in range(size)]


def _replaces(new: RankHello, old: RankHello) -> bool:
    """Tell whether a process takes the place of another, whose end nobody has noticed yet."""
    return new.rank == old.rank >= 0 and new.host == old.host and new.pid != old.pid


def _status(rank: int, member: _Member | None) -> RankStatus:
    if member is None:
        return RankStatus(rank=rank, state="missing")
    return RankStatus(
        rank=rank,
        state=member.state,
        host=member.hello.host,
        pid=member.hello.pid,
        device=member.hello.device,
        blas=member.ready.blas if member.ready else "",
        mlx_version=member.hello.mlx_version,
        loaded=member.loaded,
        memory_bytes=member.memory_bytes,
    )
