"""World. Owns the rank processes and the begin, readiness and end of epochs; plans no steps. Pure.

An epoch begins when enough rank processes have said hello. It ends with the first rank that is
lost, fails, or differs from the others. A process serves one epoch only, because MLX's groups
cannot be rebuilt, so each rank of an ended epoch must be started again. `recovery` owns the
consequences for the next epoch.
"""

from enum import Enum

from services.scheduler.cache.kv_rows import RowBudget, smallest_budget
from services.scheduler.events import Action, AllowSilence, SendToRanks, WriteLog
from services.scheduler.world.canary_comparison import explain_difference, explain_mismatch
from services.scheduler.world.dismissed_ranks import DismissedRanks
from services.scheduler.world.join_orders import JoinOrders
from services.scheduler.world.late_ranks import explain_lateness, explain_place
from services.scheduler.world.members import RankProcess, assign_ranks, is_same_process, replaces
from services.scheduler.world.passed_canary import PassedCanary
from services.scheduler.world.recovery import FailedEpoch, FailureKind, Recovery, failure_kind_of
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
    """Whether the world waits for ranks, loads the model, serves, or starts no more epochs."""

    GATHERING = "gathering"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    """No further epoch starts until an operator restarts the scheduler."""


class World:
    """The rank processes that are connected, and the current epoch, if there is one.

    It forms an epoch when enough processes wait, and decides when the epoch must end.
    """

    def __init__(
        self, config: Config, jaccl_devices: str, actions: list[Action], hostfile: str = ""
    ) -> None:
        """Start with no ranks.

        Args:
            config: the whole configuration.
            jaccl_devices: content of the device matrix; "" with another backend.
            actions: the list to which actions are appended.
            hostfile: content of MLX's hostfile; "": ranks report their addresses.
        """
        self.state = WorldState.GATHERING
        self.epoch = Epoch(0)
        self.was_ready = False
        self.recovery = Recovery(config, actions)
        self.dismissed = DismissedRanks()
        self._config = config
        self.passed_canary = PassedCanary(config.sharding)
        self._orders = JoinOrders(config, jaccl_devices, hostfile, self.passed_canary)
        self._actions = actions
        self._members: dict[PeerId, RankProcess] = {}
        self._started_at_s = 0.0
        self._now_s = 0.0
        self._vocab_size = 0
        self._failure_kind: FailureKind = ""
        """Why the current epoch ends, as far as it is known."""
        self._kv_bytes = 0
        """KV budget of the current epoch, or of the last one until another begins."""
        self._ring_obstacle = ""
        """Why the current epoch's processes cannot use the ring backend; "" if they can."""

    @property
    def size(self) -> int:
        """Number of ranks that the world needs."""
        return self._config.world.size

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The ranks of this epoch, in rank order."""
        return tuple(member.peer for member in self._ranked())

    def rank_of(self, peer: PeerId) -> int | None:
        """Return the rank of a peer in this epoch, or None if it has none."""
        member = self._members.get(peer)
        return member.rank if member else None

    def explain_loss(self, peer: PeerId, cause: str) -> str:
        """Return a sentence about a lost link, which says where in joining the rank was."""
        member = self._members.get(peer)
        place = explain_place(member, self.recovery.backend) if member else ""
        return f"Rank {self.rank_of(peer)} is lost{place} ({cause})."

    def host_of(self, peer: PeerId) -> str:
        """Return the host name that a rank process has reported; "" for an unknown peer."""
        member = self._members.get(peer)
        return member.hello.host if member else ""

    def handle_hello(self, peer: PeerId, message: RankHello, now_s: float) -> str | None:
        """Add a rank process; begin an epoch if none exists and enough processes wait.

        Args:
            peer: the process.
            message: its hello.
            now_s: when it arrived, in seconds.

        Returns:
            None, or why the current epoch must end: the process replaces one of its ranks or is one
            of them over a new connection, or the processes cannot form a world.
        """
        known = self._members.get(peer)
        if known is not None and known.rank is not None:
            return None
        self.dismissed.forget_replaced(message)
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
            return self._try_to_begin_epoch(now_s)
        return None

    def handle_loading(self, peer: PeerId, message: RankLoading) -> None:
        """Record how far a rank has joined and loaded, for the status and the deadlines."""
        member = self._members.get(peer)
        if member is not None and member.rank is not None and member.state != "ready":
            is_joining = message.stage in ("joining", "init")
            if not is_joining:
                self._judge_silence(member)
            member.is_in_init = message.stage == "init"
            member.state = "joining" if is_joining else "loading"
            member.loaded = message.loaded

    def handle_ready(self, peer: PeerId, message: RankReady) -> str | None:
        """Record that a rank has loaded; `state` becomes READY with the last rank.

        Args:
            peer: the rank process.
            message: its report.

        Returns:
            None, or why the epoch must end: its ranks differ in model, settings or canary results.
        """
        member = self._members.get(peer)
        if self.state is not WorldState.LOADING or member is None or member.rank is None:
            return None
        self._judge_silence(member)
        member.ready = message
        member.state = "ready"
        member.loaded = 1.0
        reports = self.reports()
        hosts = [one.hello.host for one in self._ranked() if one.ready is not None]
        mismatch = explain_mismatch(reports, hosts)
        if mismatch is not None:
            # Another start would end in the same mismatch.
            self.recovery.abandon_start("configuration", mismatch)
            return mismatch
        if len(reports) == self.size:
            difference = explain_difference(reports)
            if difference is not None:
                self._failure_kind = "canary"
                return difference
            self.state = WorldState.READY
            self.was_ready = True
            self.passed_canary.note(
                self.recovery.backend, [one.hello for one in self._ranked()], self._now_s
            )
            self.recovery.note_ready()
            # Remembers the size, which is needed between epochs too.
            self.vocab_size()
            self._log("info", "world_ready", seconds=round(self._age_s(), 1))
        return None

    def handle_lost(self, peer: PeerId, cause: str, now_s: float) -> bool:
        """Remove a rank process whose link is lost; return whether it was a rank of this epoch.

        If it was, the epoch must end.

        Args:
            peer: the rank process.
            cause: why the transport considers the link lost.
            now_s: when that was found, in seconds.
        """
        member = self._members.pop(peer, None)
        is_ranked = member is not None and member.rank is not None
        if member is not None and is_ranked:
            self.dismissed.add(member, now_s)
        self.dismissed.note_link_lost(peer, cause)
        return is_ranked

    def handle_failed(self, peer: PeerId, message: RankFailed, now_s: float) -> bool:
        """Remove a rank process that has failed; return whether the epoch must end.

        A message of a rank whose epoch has just ended still counts, because it may explain a
        failure that another rank reported first.

        Args:
            peer: the rank process, which the world `knows`.
            message: its report.
            now_s: when it arrived, in seconds.

        Returns:
            True if the process was a rank of this epoch, or no further epoch may start.
        """
        member = self._members.pop(peer, None)
        is_ranked = member is not None and member.rank is not None
        if member is not None and is_ranked:
            self._judge_silence(member)
            self.dismissed.add(member, now_s)
            self._failure_kind = failure_kind_of(message, is_joining=member.state == "joining")
        elif member is None and self.state is not WorldState.READY:
            # Its progress is no longer known, but only joined ranks report late causes.
            self.recovery.note_late_failure(message, failure_kind_of(message, is_joining=False))
        if message.cause == "memory" and self._kv_bytes:
            self.recovery.reduce_kv_budget(self._kv_bytes)
            self._kv_bytes = 0
        if message.permanent and (is_ranked or self.state is not WorldState.READY):
            self.recovery.abandon_start("configuration", message.detail)
        return is_ranked or (bool(self.recovery.failure) and self.state is not WorldState.FAILED)

    def knows(self, peer: PeerId) -> bool:
        """Tell whether a peer is a rank process, or was dismissed and may still run."""
        return peer in self._members or self.dismissed.has(peer)

    def overdue_reason(self, now_s: float) -> str | None:
        """Return a sentence if the ranks have not joined or loaded before the deadline, else None.

        Args:
            now_s: the monotonic time in seconds.
        """
        self._now_s = now_s
        if self.state is not WorldState.LOADING:
            return None
        backend = self.recovery.backend
        return explain_lateness(self._ranked(), self._age_s(), backend, self._config.scheduler)

    def end_epoch(
        self, cause: str, now_s: float, *, was_stuck: bool = True, is_symptom: bool = False
    ) -> None:
        """End the epoch, dismiss its ranks, and begin the next epoch if enough processes wait.

        Args:
            cause: why it ends, one sentence.
            now_s: the monotonic time in seconds.
            was_stuck: it had running sequences but produced no token, which counts as a failure.
            is_symptom: the cause may be the consequence of what another rank reports later.
        """
        if self.state in (WorldState.LOADING, WorldState.READY):
            was_ready = self.state is WorldState.READY
            self._log("warning", "epoch_ended", cause=cause)
            if was_stuck or not was_ready:
                known = (self._failure_kind, self._ring_obstacle, is_symptom)
                failed = FailedEpoch(self.epoch, cause, was_ready, *known)
                self.recovery.epoch_failed(failed, now_s)
                self.passed_canary.forget()
        self.dismiss_ranks(cause, now_s)
        self._failure_kind = ""
        if self.recovery.failure:
            self.state = WorldState.FAILED
        else:
            self._try_to_begin_epoch(now_s)

    def dismiss_ranks(self, cause: str, now_s: float) -> None:
        """Tell all ranks of the epoch to leave, without beginning another epoch.

        Args:
            cause: why the epoch ends, one sentence for the ranks.
            now_s: the monotonic time in seconds, from which the ranks are listed as dismissed.
        """
        self._now_s = now_s
        peers = self.peers
        if peers:
            leave = LeaveWorld(
                epoch=self.epoch,
                detail=cause[:4_000],
                cause="canary" if self._failure_kind == "canary" else "other",
            )
            self._actions.append(SendToRanks(peers, leave, self.epoch))
        for peer in peers:
            member = self._members.pop(peer)
            self._judge_silence(member)
            self.dismissed.add(member, now_s)
        for member in self._members.values():
            # It may have said hello before the process that it replaces was dismissed.
            self.dismissed.forget_replaced(member.hello)
        self.state = WorldState.GATHERING

    def extend_deadlines(self, seconds: float, now_s: float) -> None:
        """Postpone the deadlines of joining and loading after a time without reading messages.

        Args:
            seconds: how long the scheduler did not run, by which they are postponed.
            now_s: the monotonic time in seconds; the deadlines count from then at the latest.
        """
        self._started_at_s = min(now_s, self._started_at_s + seconds)

    def reports(self) -> list[RankReady]:
        """Return the reports of the ranks that have loaded, in rank order."""
        return [member.ready for member in self._ranked() if member.ready is not None]

    def kv_budget(self) -> RowBudget:
        """Return the KV memory that each rank may use, as reported by the rank with the least.

        After an epoch that ran out of device memory, all later ones get less.
        """
        budget = self.recovery.limit_budget(smallest_budget(self.reports()))
        self._kv_bytes = budget.bytes_max
        return budget

    def context_tokens_max(self) -> int:
        """Return the model's longest context in tokens; 0 before a rank has loaded."""
        return min((report.context_tokens_max for report in self.reports()), default=0)

    def vocab_size(self) -> int:
        """Return the vocabulary size of the model of the current or the last epoch."""
        self._vocab_size = min((r.vocab_size for r in self.reports()), default=self._vocab_size)
        return self._vocab_size

    def fingerprint(self) -> str:
        """Return the model's fingerprint; "" before a rank has loaded."""
        return next((report.model_fingerprint for report in self.reports()), "")

    def note_memory(self, peer: PeerId, memory_bytes: int) -> None:
        """Record a rank's memory use in bytes, for the status."""
        member = self._members.get(peer)
        if member is not None:
            member.memory_bytes = memory_bytes

    def explain(self) -> str:
        """Return a sentence on why the world is not ready; "" if it is."""
        match self.state:
            case WorldState.READY:
                return ""
            case WorldState.FAILED:
                return self.recovery.detail
            case WorldState.LOADING:
                done = [member.loaded for member in self._ranked()]
                text = f"The ranks are loading the model ({100 * min(done, default=0.0):.0f} %)."
            case WorldState.GATHERING:
                text = f"{len(self._members)} of {self.size} ranks are connected."
        return text + self.recovery.explain()

    def statuses(self) -> list[RankStatus]:
        """Return the status of every rank of the world, including missing ones."""
        known = {member.rank: member.status() for member in self._ranked()}
        ranks = range(self.size)
        return [known.get(rank) or RankStatus(rank=rank, state="missing") for rank in ranks]

    def _ranked(self) -> list[RankProcess]:
        ranked = [member for member in self._members.values() if member.rank is not None]
        return sorted(ranked, key=lambda member: member.rank or 0) if len(ranked) > 1 else ranked

    def _try_to_begin_epoch(self, now_s: float) -> str | None:
        """Begin an epoch if enough processes wait; return why they cannot form a world, or None."""
        chosen = assign_ranks([m for m in self._members.values() if m.rank is None], self.size)
        if chosen is None:
            return None
        epoch = Epoch(self.epoch + 1)
        try:
            orders = self._orders.make(epoch, self.recovery.backend, chosen, now_s)
        except ConfigError as error:
            self.recovery.abandon_start("configuration", str(error))
            self.state = WorldState.FAILED
            return str(error)
        self.epoch = epoch
        self.state = WorldState.LOADING
        self._started_at_s = self._now_s = now_s
        self._ring_obstacle = self._orders.find_ring_obstacle(chosen)
        self._kv_bytes = 0
        self._log("info", "epoch_begins", ranks=self.size, backend=self.recovery.backend)
        # Until they have joined, only the deadline for joining counts.
        self._actions.append(AllowSilence(tuple(one.peer for one in chosen), is_allowed=True))
        for rank, member in enumerate(chosen):
            member.rank = rank
            self._actions.append(SendToRanks((member.peer,), orders[rank], epoch))
        return None

    def _judge_silence(self, member: RankProcess) -> None:
        """End the time in which a joining rank may be silent."""
        if member.state == "joining":
            self._actions.append(AllowSilence((member.peer,), is_allowed=False))

    def _age_s(self) -> float:
        return self._now_s - self._started_at_s

    def _log(self, level: str, event: str, **fields: object) -> None:
        self._actions.append(WriteLog(level, event, {"epoch": self.epoch, **fields}))
