"""The ranks and the epoch: rendezvous, loading, readiness, and what ends an epoch. Pure.

An epoch is one life of the world. It begins when enough rank processes have said hello, and ends
with the first of them that is lost, fails, or differs. A process serves one epoch only (MLX's
groups cannot be rebuilt), so every rank of an ended epoch must come back as a new process. What the
end of an epoch means for the next one is `recovery`'s.
"""

from enum import Enum

from services.scheduler.dismissed import Dismissed
from services.scheduler.environment import world_environment
from services.scheduler.events import Action, Say, SendToRanks
from services.scheduler.findings import difference
from services.scheduler.members import Member, assign, is_same_process, replaces
from services.scheduler.recovery import Recovery
from services.scheduler.rows import RowBudget
from shared import limits
from shared.errors import ConfigError
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


class World:
    """Ranks by peer; at most one epoch at a time."""

    def __init__(
        self, config: Config, jaccl_devices: str, out: list[Action], hostfile: str = ""
    ) -> None:
        """Start with no ranks.

        Args:
            config: the whole configuration.
            jaccl_devices: content of the device matrix, "" when the backend is another.
            out: where actions go.
            hostfile: content of MLX's hostfile, "" when ranks say where they are.
        """
        self.state = WorldState.GATHERING
        self.epoch = Epoch(0)
        self.was_ready = False
        self.recovery = Recovery(config, out)
        self.dismissed = Dismissed()
        self._config = config
        self._jaccl_devices = jaccl_devices
        self._hostfile = hostfile
        self._out = out
        self._members: dict[PeerId, Member] = {}
        self._started_at_s = 0.0
        self._now_s = 0.0
        self._vocab_size = 0
        self._is_excused = False
        """The present epoch ends through no fault of this cluster."""
        self._failed_canary = False
        """The present epoch ends because its ranks compute wrong numbers together."""
        self._kv_bytes = 0
        """Budget that the present epoch, or the last one until another begins, works with."""
        self._had_ports = False

    @property
    def size(self) -> int:
        """Ranks that the world needs."""
        return self._config.world.size

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The ranks of this epoch, in rank order."""
        return tuple(member.peer for member in self._ranked())

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
        self.dismissed.greeted(message)
        for other in list(self._members.values()):
            if other.rank is None and is_same_process(message, other.hello):
                del self._members[other.peer]
        self._members[peer] = Member(peer, message)
        for member in self._ranked():
            if replaces(message, member.hello):
                return f"Rank {member.rank} was started again (process {message.pid})."
            if is_same_process(message, member.hello):
                return f"Rank {member.rank} has lost its connection (process {message.pid})."
        if self.state is WorldState.GATHERING:
            return self._try_to_begin(now_s)
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
            differs = difference(reports)
            if differs is not None:
                self._failed_canary = True
                return differs
            self.state = WorldState.READY
            self.was_ready = True
            self.recovery.canary_passed()
            # Asked for between two epochs too.
            self.vocab_size()
            self._say("info", "world_ready", seconds=round(self._age_s(), 1))
        return None

    def lost(self, peer: PeerId, cause: str, now_s: float) -> bool:
        """A link to a rank process is lost; True when this ends the epoch."""
        member = self._members.pop(peer, None)
        is_ranked = member is not None and member.rank is not None
        if member is not None and is_ranked:
            self.dismissed.add(member, now_s)
        self.dismissed.link_lost(peer, cause)
        return is_ranked

    def failed(self, peer: PeerId, message: RankFailed, now_s: float) -> bool:
        """A rank says that it ends; True when this ends the epoch, or all trying.

        What a stranger says changes nothing. What a rank says whose epoch has just ended still
        counts: when all fail for one reason, another one may have been heard first.
        """
        if not self.knows(peer):
            return False
        member = self._members.pop(peer, None)
        is_ranked = member is not None and member.rank is not None
        if member is not None and is_ranked:
            self.dismissed.add(member, now_s)
        self._is_excused = message.cause == "unavailable"
        self._failed_canary = is_ranked and message.cause == "canary"
        if message.cause == "memory" and self._kv_bytes:
            self.recovery.memory_ran_out(self._kv_bytes)
            self._kv_bytes = 0
        gives_up = message.permanent and (is_ranked or self.state is not WorldState.READY)
        if gives_up:
            self.recovery.give_up("configuration", message.detail)
        return is_ranked or gives_up

    def knows(self, peer: PeerId) -> bool:
        """Tell whether a peer is a rank process, or was one of an epoch that has just ended."""
        return peer in self._members or self.dismissed.has(peer)

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

    def end(self, cause: str, now_s: float, *, was_stuck: bool = True) -> None:
        """End the epoch: its ranks are told to go, and those that come back form the next one.

        Args:
            cause: why, one sentence.
            now_s: the time.
            was_stuck: if it was ready, it had work and gave nobody a token.
        """
        if self.state in (WorldState.LOADING, WorldState.READY):
            was_ready = self.state is WorldState.READY
            self._say("warning", "epoch_ended", cause=cause)
            if (was_stuck or not was_ready) and not self._is_excused:
                self.recovery.epoch_failed(
                    cause,
                    now_s,
                    was_ready=was_ready,
                    has_ports=self._had_ports,
                    failed_canary=self._failed_canary,
                )
        self._is_excused = self._failed_canary = False
        self.dismiss_all(cause, now_s)
        if self.recovery.failure:
            self.state = WorldState.FAILED
        else:
            self._try_to_begin(now_s)

    def dismiss_all(self, cause: str, now_s: float) -> None:
        """Tell every rank of the epoch to leave; no other begins by itself."""
        self._now_s = now_s
        peers = self.peers
        if peers:
            leave = LeaveWorld(epoch=self.epoch, detail=cause[:4_000])
            self._out.append(SendToRanks(peers, leave, self.epoch))
        for peer in peers:
            self.dismissed.add(self._members.pop(peer), now_s)
        for member in self._members.values():
            # It may have come before the end of the one whose place it takes was known.
            self.dismissed.greeted(member.hello)
        self.state = WorldState.GATHERING

    def pardon(self, seconds: float, now_s: float) -> None:
        """Do not count a time in which nobody here could take in what ranks say."""
        self._started_at_s = min(now_s, self._started_at_s + seconds)

    def reports(self) -> list[RankReady]:
        """Return what the ranks that have loaded say of themselves, in rank order."""
        return [member.ready for member in self._ranked() if member.ready is not None]

    def budget(self) -> RowBudget:
        """Return what the poorest rank can hold, as far as earlier epochs could."""
        reports = self.reports()
        poorest = min(reports, key=lambda r: r.kv_budget_bytes / max(1, r.kv_bytes_per_token))
        budget = self.recovery.bounded(
            RowBudget(
                poorest.kv_budget_bytes,
                max(report.kv_bytes_per_token for report in reports),
                max(report.kv_bytes_per_row for report in reports),
            )
        )
        self._kv_bytes = budget.bytes_max
        return budget

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
                return self.recovery.detail
            case WorldState.LOADING:
                done = [member.loaded for member in self._ranked()]
                return f"The ranks are loading the model ({100 * min(done, default=0.0):.0f} %)."
            case WorldState.GATHERING:
                return f"{len(self._members)} of {self.size} ranks are there."

    def statuses(self) -> list[RankStatus]:
        """Describe every rank of the world, missing ones too."""
        by_rank = {member.rank: member for member in self._ranked()}
        return [
            by_rank[rank].status() if rank in by_rank else RankStatus(rank=rank, state="missing")
            for rank in range(self.size)
        ]

    def _ranked(self) -> list[Member]:
        ranked = [member for member in self._members.values() if member.rank is not None]
        return sorted(ranked, key=lambda member: member.rank or 0)

    def _try_to_begin(self, now_s: float) -> str | None:
        """Begin an epoch if there are enough processes; return why they cannot form a world."""
        chosen = assign([m for m in self._members.values() if m.rank is None], self.size)
        if chosen is None:
            return None
        epoch = Epoch(self.epoch + 1)
        try:
            orders = [self._join(epoch, rank, chosen) for rank in range(self.size)]
        except ConfigError as error:
            self.recovery.give_up("configuration", str(error))
            self.state = WorldState.FAILED
            return str(error)
        self.epoch = epoch
        self.state = WorldState.LOADING
        self._started_at_s = self._now_s = now_s
        self._had_ports = all(":" in member.hello.data_address for member in chosen)
        self._kv_bytes = 0
        self._say("info", "epoch_begins", ranks=self.size, backend=self.recovery.backend)
        for rank, member in enumerate(chosen):
            member.rank = rank
            self._out.append(SendToRanks((member.peer,), orders[rank], epoch))
        return None

    def _join(self, epoch: Epoch, rank: int, chosen: list[Member]) -> JoinWorld:
        config = self._config
        backend = self.recovery.backend
        environment: dict[str, str] = {}
        files: dict[str, str] = {}
        if not chosen[rank].hello.launched:
            environment, files = world_environment(
                backend,
                rank,
                self.size,
                [member.hello.data_address for member in chosen],
                jaccl_devices_text=self._jaccl_devices,
                jaccl_coordinator=config.world.jaccl_coordinator,
                hostfile_text=self._hostfile,
                fast_synch=self._may_synchronize_fast(chosen),
                machines=[member.hello.host for member in chosen],
            )
        wanted = config.world.receipt_logits
        alike = len({(m.hello.device, m.hello.mlx_version) for m in chosen}) == 1
        return JoinWorld(
            epoch=epoch,
            rank=rank,
            world_size=self.size,
            backend=backend,
            sharding=config.sharding,
            memory_bytes=[member.hello.memory_bytes for member in chosen],
            canary=config.world.canary,
            environment=environment,
            files=files,
            synchronization=config.world.synchronization,
            receipt_logits=self.size > 1 and (wanted == "on" or (wanted == "auto" and alike)),
            init_deadline_s=config.scheduler.init_deadline_s,
            load_deadline_s=config.scheduler.load_deadline_s,
            step_deadline_max_s=limits.STEP_DEADLINE_MAX_S,
        )

    def _may_synchronize_fast(self, chosen: list[Member]) -> bool:
        wanted = self._config.world.metal_fast_synch
        proven = all(member.hello.fast_synch == "proven" for member in chosen)
        return wanted == "on" or (wanted == "auto" and proven)

    def _age_s(self) -> float:
        return self._now_s - self._started_at_s

    def _say(self, level: str, event: str, **fields: object) -> None:
        self._out.append(Say(level, event, {"epoch": self.epoch, **fields}))
