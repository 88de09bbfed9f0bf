"""The ranks and the epoch: rendezvous, loading, readiness, and what ends an epoch. Pure.

An epoch is one life of the world. It begins when enough rank processes have said hello, and ends
with the first of them that is lost, fails, or differs. A process serves one epoch only (MLX's
groups cannot be rebuilt), so every rank of an ended epoch must come back as a new process. What the
end of an epoch means for the next one is `recovery`'s.
"""

from enum import Enum

from services.scheduler.cache.kv_rows import RowBudget, poorest
from services.scheduler.events import Action, Say, SendToRanks
from services.scheduler.world.canary_comparison import difference, mismatch
from services.scheduler.world.dismissed_ranks import DismissedRanks
from services.scheduler.world.join_orders import JoinOrders
from services.scheduler.world.members import RankProcess, assign, is_same_process, replaces
from services.scheduler.world.recovery import Ending, FailedEpoch, Recovery
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.identifiers import Epoch, PeerId
from shared.messages import (
    LeaveWorld,
    RankFailed,
    RankHello,
    RankLoading,
    RankReady,
    RankStatus,
)


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
        self.dismissed = DismissedRanks()
        self._config = config
        self._orders = JoinOrders(config, jaccl_devices, hostfile)
        self._out = out
        self._members: dict[PeerId, RankProcess] = {}
        self._started_at_s = 0.0
        self._now_s = 0.0
        self._vocab_size = 0
        self._ending: Ending = ""
        """What is known of why the present epoch ends."""
        self._kv_bytes = 0
        """Budget that the present epoch, or the last one until another begins, works with."""
        self._no_ring = ""
        """Why the present epoch's processes could not be joined over ring."""

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
        self._members[peer] = RankProcess(peer, message)
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
        hosts = [one.hello.host for one in self._ranked() if one.ready is not None]
        unlike = mismatch(reports, hosts)
        if unlike is not None:
            # They would load and compute the same again.
            self.recovery.give_up("configuration", unlike)
            return unlike
        if len(reports) == self.size:
            differs = difference(reports)
            if differs is not None:
                self._ending = "canary"
                return differs
            self.state = WorldState.READY
            self.was_ready = True
            self.recovery.was_ready()
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
            self._ending = _ending(message, is_joining=member.state == "joining")
        elif member is None and self.state is not WorldState.READY:
            # How far it was is not known any more; a sum is only computed by who has joined.
            self.recovery.heard_late(message, _ending(message, is_joining=False))
        if message.cause == "memory" and self._kv_bytes:
            self.recovery.memory_ran_out(self._kv_bytes)
            self._kv_bytes = 0
        if message.permanent and (is_ranked or self.state is not WorldState.READY):
            self.recovery.give_up("configuration", message.detail)
        return is_ranked or (bool(self.recovery.failure) and self.state is not WorldState.FAILED)

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
            if was_stuck or not was_ready:
                failed = FailedEpoch(self.epoch, cause, was_ready, self._ending, self._no_ring)
                self.recovery.epoch_failed(failed, now_s)
        has_failed_canary = self._ending == "canary"
        self._ending = ""
        self.dismiss_all(cause, now_s, has_failed_canary=has_failed_canary)
        if self.recovery.failure:
            self.state = WorldState.FAILED
        else:
            self._try_to_begin(now_s)

    def dismiss_all(self, cause: str, now_s: float, *, has_failed_canary: bool = False) -> None:
        """Tell every rank of the epoch to leave; no other begins by itself."""
        self._now_s = now_s
        peers = self.peers
        if peers:
            leave = LeaveWorld(
                epoch=self.epoch,
                detail=cause[:4_000],
                cause="canary" if has_failed_canary else "other",
            )
            self._out.append(SendToRanks(peers, leave, self.epoch))
        for peer in peers:
            self.dismissed.add(self._members.pop(peer), now_s)
        for member in self._members.values():
            # It may have come before the end of the one whose place it takes was known.
            self.dismissed.greeted(member.hello)
        self.state = WorldState.GATHERING

    def extend_deadlines(self, seconds: float, now_s: float) -> None:
        """Do not count a time in which nobody here could take in what ranks say."""
        self._started_at_s = min(now_s, self._started_at_s + seconds)

    def reports(self) -> list[RankReady]:
        """Return what the ranks that have loaded say of themselves, in rank order."""
        return [member.ready for member in self._ranked() if member.ready is not None]

    def budget(self) -> RowBudget:
        """Return what the poorest rank can hold, as far as earlier epochs could."""
        budget = self.recovery.bounded(poorest(self.reports()))
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
                now = f"The ranks are loading the model ({100 * min(done, default=0.0):.0f} %)."
            case WorldState.GATHERING:
                now = f"{len(self._members)} of {self.size} ranks are there."
        return now + self.recovery.explain()

    def statuses(self) -> list[RankStatus]:
        """Describe every rank of the world, missing ones too."""
        by_rank = {member.rank: member for member in self._ranked()}
        return [
            by_rank[rank].status() if rank in by_rank else RankStatus(rank=rank, state="missing")
            for rank in range(self.size)
        ]

    def _ranked(self) -> list[RankProcess]:
        ranked = [member for member in self._members.values() if member.rank is not None]
        return sorted(ranked, key=lambda member: member.rank or 0)

    def _try_to_begin(self, now_s: float) -> str | None:
        """Begin an epoch if there are enough processes; return why they cannot form a world."""
        chosen = assign([m for m in self._members.values() if m.rank is None], self.size)
        if chosen is None:
            return None
        epoch = Epoch(self.epoch + 1)
        try:
            orders = self._orders.make(epoch, self.recovery.backend, chosen)
        except ConfigError as error:
            self.recovery.give_up("configuration", str(error))
            self.state = WorldState.FAILED
            return str(error)
        self.epoch = epoch
        self.state = WorldState.LOADING
        self._started_at_s = self._now_s = now_s
        self._no_ring = self._orders.why_no_ring(chosen)
        self._kv_bytes = 0
        self._say("info", "epoch_begins", ranks=self.size, backend=self.recovery.backend)
        for rank, member in enumerate(chosen):
            member.rank = rank
            self._out.append(SendToRanks((member.peer,), orders[rank], epoch))
        return None

    def _age_s(self) -> float:
        return self._now_s - self._started_at_s

    def _say(self, level: str, event: str, **fields: object) -> None:
        self._out.append(Say(level, event, {"epoch": self.epoch, **fields}))


def _ending(message: RankFailed, *, is_joining: bool) -> Ending:
    """Return what a rank's last words say of why its epoch ends."""
    if message.cause == "unavailable":
        # Before ranks have joined nothing but another rank can be missing.
        return "apart" if is_joining else "unavailable"
    return "canary" if message.cause == "canary" else ""
