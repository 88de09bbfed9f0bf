"""World. Owns the rank processes and the begin, readiness and end of epochs; plans no steps. Pure.

An epoch begins when enough rank processes have said hello. It ends with the first rank that is
lost, fails, or differs from the others. A process serves one epoch only, because MLX's groups
cannot be rebuilt, so each rank of an ended epoch must be started again, or a spare process takes
its place. `recovery` owns the consequences for the next epoch.
"""

from collections.abc import Sequence
from enum import Enum

from msgspec import structs

from services.scheduler.events import Action, WriteLog
from services.scheduler.world.dismissed_ranks import DismissedRanks
from services.scheduler.world.epoch_ranks import EpochRanks
from services.scheduler.world.join_orders import JoinOrders
from services.scheduler.world.late_ranks import explain_place
from services.scheduler.world.members import RankProcess, assign_ranks, is_same_process
from services.scheduler.world.passed_canary import PassedCanary
from services.scheduler.world.recovery import FailedEpoch, FailureKind, Recovery, failure_kind_of
from services.scheduler.world.reported_model import ReportedModel
from services.scheduler.world.spare_world import SpareWorld
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.identifiers import Epoch, PeerId
from shared.messages import PlaceTaken, RankFailed, RankHello, RankLoading, RankReady, RankStatus


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
        self.model = ReportedModel(self.reports, self.recovery)
        self.dismissed = DismissedRanks()
        self._config = config
        self.passed_canary = PassedCanary(config.sharding)
        self._orders = JoinOrders(config, jaccl_devices, hostfile, self.passed_canary)
        self._actions = actions
        self._waiting: dict[PeerId, RankProcess] = {}
        """Processes that wait for an epoch."""
        self._ranks: EpochRanks | None = None
        """Those of the current epoch; None between epochs."""
        self.spares = SpareWorld(config, self.passed_canary, self.dismissed, actions)
        self._last_epoch = Epoch(0)
        """The latest that has begun, of this world or of a spare world."""
        self._places_taken: list[RankHello] = []
        """Spare processes that have said since the last end of an epoch that a process before them
        has ended."""
        self._failure_kind: FailureKind = ""
        """Why the current epoch ends, as far as it is known."""

    @property
    def size(self) -> int:
        """Number of ranks that the world needs."""
        return self._config.world.size

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The ranks of this epoch, in rank order."""
        return self._ranks.peers if self._ranks is not None else ()

    def find(self, peer: PeerId) -> RankProcess | None:
        """Return the process of a rank of this epoch; None for another peer."""
        return self._ranks.find(peer) if self._ranks is not None else None

    def rank_of(self, peer: PeerId) -> int | None:
        """Return the rank of a peer in this epoch, or None if it has none."""
        member = self.find(peer)
        return member.rank if member else None

    def explain_loss(self, peer: PeerId, cause: str) -> str:
        """Return a sentence about a lost link, which says where in joining the rank was."""
        member = self.find(peer)
        place = explain_place(member, self.recovery.backend) if member else ""
        return f"Rank {self.rank_of(peer)} is lost{place} ({cause})."

    def handle_process(
        self, peer: PeerId, message: RankHello | PlaceTaken, now_s: float
    ) -> str | None:
        """Add a rank process, or let a spare one be a rank; begin an epoch if enough wait.

        Args:
            peer: the process.
            message: its hello, or that the process before it has ended.
            now_s: when it arrived, in seconds.

        Returns:
            None, or why the current epoch must end: the process replaces one of its ranks or is one
            of them over a new connection, or the processes cannot form a world.
        """
        if isinstance(message, PlaceTaken):
            member = self.find(peer) or self.spares.find(peer)
            if member is not None:
                self.dismissed.forget_replaced(member.hello)
                self._places_taken.append(member.hello)
            if (waiting := self.spares.remove(peer)) is None:
                is_spare = self.spares.has(peer)
                return f"The process of rank {message.rank} has ended." if is_spare else None
            message = structs.replace(waiting.hello, spare=False)
        if self.find(peer) is not None:
            return None
        if message.spare:
            self.spares.handle_hello(peer, message, now_s)
            self._try_to_begin_spares(now_s)
            return None
        self.spares.end_if_replaced(message, now_s)
        self.dismissed.forget_replaced(message)
        for other in list(self._waiting.values()):
            if is_same_process(message, other.hello):
                del self._waiting[other.peer]
        self._waiting[peer] = RankProcess(peer, message)
        if self._ranks is not None and (replaced := self._ranks.explain_replacement(message)):
            return replaced
        return self._try_to_begin_epoch(now_s) if self.state is WorldState.GATHERING else None

    def handle_loading(self, peer: PeerId, message: RankLoading) -> None:
        """Record how far a rank has joined and loaded, for the status and the deadlines."""
        for ranks in (self._ranks, self.spares.ranks):
            if ranks is not None:
                ranks.note_loading(peer, message)

    def handle_ready(self, peer: PeerId, message: RankReady, now_s: float) -> str | None:
        """Record that a rank has loaded; `state` becomes READY with the last rank.

        Args:
            peer: the rank process.
            message: its report.
            now_s: when it arrived, in seconds.

        Returns:
            None, or why the epoch must end: its ranks differ in model, settings or canary results.
        """
        spares = self.spares.ranks
        if spares is not None and spares.find(peer) is not None:
            self.spares.handle_ready(peer, message, now_s)
        if self.state is not WorldState.LOADING or self._ranks is None or not self.find(peer):
            return None
        self._ranks.note_ready(peer, message)
        mismatch = self._ranks.explain_mismatch()
        if mismatch is not None:
            # Another start would end in the same mismatch.
            self._abandon_start(mismatch)
            return mismatch
        difference = self._ranks.explain_difference()
        if difference is not None:
            self._failure_kind = "canary"
            return difference
        if self._ranks.is_loaded:
            self.passed_canary.note(self._ranks.backend, self._ranks.hellos, now_s)
            if self._ranks.were_spares:
                self.spares.note_loaded()
            self._become_ready(now_s, self._ranks.age_s(now_s))
        return None

    def _become_ready(self, now_s: float, seconds: float) -> None:
        self.state = WorldState.READY
        self.was_ready = True
        self.recovery.note_ready()
        self.model.note_ready()
        self._log("info", "world_ready", seconds=round(seconds, 1))
        self._try_to_begin_spares(now_s)

    def handle_lost(self, peer: PeerId, cause: str, now_s: float) -> bool:
        """Remove a rank process whose link is lost; return whether it was a rank of this epoch.

        If it was, the epoch must end.

        Args:
            peer: the rank process.
            cause: why the transport considers the link lost.
            now_s: when that was found, in seconds.
        """
        self._waiting.pop(peer, None)
        member = self._ranks.remove(peer) if self._ranks is not None else None
        if member is not None:
            self.dismissed.add(member, now_s)
        self.spares.handle_lost(peer, cause, now_s)
        self.dismissed.note_link_lost(peer, cause)
        return member is not None

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
        if self.spares.handle_failed(peer, message, now_s):
            return False
        was_waiting = self._waiting.pop(peer, None) is not None
        member = self._ranks.remove(peer) if self._ranks is not None else None
        is_ranked = member is not None
        if self._ranks is not None and member is not None:
            self._ranks.judge_silence(member)
            self.dismissed.add(member, now_s)
            self._failure_kind = failure_kind_of(message, is_joining=member.state == "joining")
        elif not was_waiting and self.state is not WorldState.READY:
            # Its progress is no longer known, but only joined ranks report late causes.
            self.recovery.note_late_failure(message, failure_kind_of(message, is_joining=False))
        if message.cause == "memory":
            self.model.reduce_kv_budget()
        if message.permanent and (is_ranked or self.state is not WorldState.READY):
            self._abandon_start(message.detail)
        return is_ranked or (bool(self.recovery.failure) and self.state is not WorldState.FAILED)

    def knows(self, peer: PeerId) -> bool:
        """Tell whether a peer is a rank process, or was dismissed and may still run."""
        is_present = peer in self._waiting or self.find(peer) is not None
        return is_present or self.spares.has(peer) or self.dismissed.has(peer)

    def overdue_reason(self, now_s: float) -> str | None:
        """Return a sentence if the ranks have not joined or loaded before the deadline, else None.

        Args:
            now_s: the monotonic time in seconds.
        """
        self.spares.check_deadlines(now_s)
        if self.state is not WorldState.LOADING or self._ranks is None:
            return None
        return self._ranks.overdue_reason(now_s, self._config.scheduler)

    def end_epoch(
        self, cause: str, now_s: float, *, was_stuck: bool = True, is_symptom: bool = False
    ) -> None:
        """End the epoch and dismiss its ranks; begin the next one if processes for it are there.

        A spare world becomes the next epoch: if it has loaded, the state is READY at once.

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
                obstacle = self._ranks.ring_obstacle if self._ranks is not None else ""
                known = (self._failure_kind, obstacle, is_symptom)
                failed = FailedEpoch(self.epoch, cause, was_ready, *known)
                self.recovery.epoch_failed(failed, now_s)
                self.passed_canary.forget()
        self._leave_epoch(cause, now_s)
        self._failure_kind = ""
        if self.recovery.failure:
            self.state = WorldState.FAILED
            self.spares.end(cause, now_s, counts=False)
        elif (spares := self.spares.take(self.recovery.backend, now_s)) is not None:
            self._set_current(spares)
            self._log("info", "epoch_begins", ranks=self.size, backend=spares.backend)
            if spares.is_loaded:
                self._become_ready(now_s, 0.0)
        else:
            self._try_to_begin_epoch(now_s)

    def dismiss_ranks(self, cause: str, now_s: float) -> None:
        """Tell all ranks, and those of a spare world, to leave, without beginning another epoch.

        Args:
            cause: why the epoch ends, one sentence for the ranks.
            now_s: the monotonic time in seconds, from which the ranks are listed as dismissed.
        """
        self._leave_epoch(cause, now_s)
        self.spares.end(cause, now_s, counts=False)

    def _leave_epoch(self, cause: str, now_s: float) -> None:
        if self._ranks is not None:
            is_canary = self._failure_kind == "canary"
            self._ranks.dismiss(cause, now_s, self.dismissed, is_canary=is_canary)
            self._ranks = None
        # They may have spoken before the processes that they replace were dismissed.
        for hello in [*self._places_taken, *(one.hello for one in self._waiting.values())]:
            self.dismissed.forget_replaced(hello)
        self._places_taken.clear()
        self.state = WorldState.GATHERING

    def extend_deadlines(self, seconds: float, now_s: float) -> None:
        """Postpone the deadlines of joining and loading after a time without reading messages.

        Args:
            seconds: how long the scheduler did not run, by which they are postponed.
            now_s: the monotonic time in seconds; the deadlines count from then at the latest.
        """
        for ranks in (self._ranks, self.spares.ranks):
            if ranks is not None:
                ranks.extend_deadlines(seconds, now_s)

    def reports(self) -> list[RankReady]:
        """Return the reports of the ranks that have loaded, in rank order."""
        return self._ranks.reports() if self._ranks is not None else []

    def explain(self) -> str:
        """Return a sentence on why the world is not ready; "" if it is."""
        match self.state:
            case WorldState.READY:
                return ""
            case WorldState.FAILED:
                return self.recovery.detail
            case WorldState.LOADING:
                done = self._ranks.loaded if self._ranks is not None else 0.0
                text = f"The ranks are loading the model ({100 * done:.0f} %)."
            case WorldState.GATHERING:
                text = f"{len(self._waiting)} of {self.size} ranks are connected."
        return text + self.recovery.explain()

    def statuses(self) -> list[RankStatus]:
        """Return the status of every rank of the world, including missing ones."""
        members = self._ranks.members if self._ranks is not None else []
        known = {member.rank: member.status() for member in members}
        ranks = range(self.size)
        return [known.get(rank) or RankStatus(rank=rank, state="missing") for rank in ranks]

    def _try_to_begin_epoch(self, now_s: float) -> str | None:
        """Begin an epoch if enough processes wait; return why they cannot form a world, or None."""
        chosen = assign_ranks(self._waiting.values(), self.size)
        if chosen is None:
            return None
        try:
            ranks = self._begin(chosen, now_s)
        except ConfigError as error:
            self.recovery.abandon_start("configuration", str(error))
            self.state = WorldState.FAILED
            return str(error)
        for peer in ranks.peers:
            del self._waiting[peer]
        self._set_current(ranks)
        self._log("info", "epoch_begins", ranks=self.size, backend=ranks.backend)
        return None

    def _abandon_start(self, detail: str) -> None:
        """Rule out further epochs; not if spares lacked room, which new processes may have."""
        if self._ranks is None or not self._ranks.were_spares:
            self.recovery.abandon_start("configuration", detail)

    def _try_to_begin_spares(self, now_s: float) -> None:
        """Begin the spare world if this world serves and each rank has a spare process."""
        if self.state is WorldState.READY:
            budgets = [report.kv_budget_bytes for report in self.reports()]
            self.spares.begin_if_complete(lambda chosen: self._begin(chosen, now_s, budgets), now_s)

    def _begin(
        self, chosen: Sequence[RankProcess], now_s: float, kv_budgets: Sequence[int] = ()
    ) -> EpochRanks:
        """Order processes to join an epoch.

        Raises:
            ConfigError: they cannot connect with the backend.
        """
        epoch, backend = Epoch(self._last_epoch + 1), self.recovery.backend
        orders = self._orders.make(epoch, backend, chosen, now_s, kv_budgets)
        self._last_epoch = epoch
        ranks = EpochRanks(epoch, backend, chosen, orders, now_s, self._actions)
        ranks.ring_obstacle = self._orders.find_ring_obstacle(chosen)
        return ranks

    def _set_current(self, ranks: EpochRanks) -> None:
        self._ranks = ranks
        self.epoch = ranks.epoch
        self.state = WorldState.LOADING
        self.model.forget_kv_budget()

    def _log(self, level: str, event: str, **fields: object) -> None:
        self._actions.append(WriteLog(level, event, {"epoch": self.epoch, **fields}))
