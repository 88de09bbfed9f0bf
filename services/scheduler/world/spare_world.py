"""The spare world: spare processes of all ranks that load while the world before them serves. Pure.

Once each rank has a spare process that said hello, they begin an epoch of their own: they join,
load and pass the canary as any world does, and wait. When the serving epoch ends, theirs follows
it, so no weights are read while streams wait.
"""

from services.scheduler.events import Action, WriteLog
from services.scheduler.world.dismissed_ranks import DismissedRanks
from services.scheduler.world.epoch_ranks import EpochRanks
from services.scheduler.world.members import RankProcess, assign_ranks, is_same_process
from services.scheduler.world.passed_canary import PassedCanary
from shared.configuration.settings import Config
from shared.identifiers import PeerId
from shared.messages import RankHello, RankReady
from shared.messages.rank_link import Backend

STARTS_MAX = 3
"""Failed starts in a row after which no spare world is begun: a lack of memory does not pass."""


class SpareWorld:
    """The spare processes that wait for a world of their own, and that world."""

    def __init__(
        self,
        config: Config,
        passed_canary: PassedCanary,
        dismissed: DismissedRanks,
        actions: list[Action],
    ) -> None:
        """Begin without spare processes.

        Args:
            config: the whole configuration.
            passed_canary: is told of a canary that has passed.
            dismissed: gets processes that are told to leave.
            actions: the list to which actions are appended.
        """
        self.ranks: EpochRanks | None = None
        """The spare world; None: it has not begun."""
        self._config = config
        self._passed_canary = passed_canary
        self._dismissed = dismissed
        self._actions = actions
        self._waiting: dict[PeerId, RankProcess] = {}
        self._starts_failed = 0

    def has(self, peer: PeerId) -> bool:
        """Tell whether a peer is a spare process."""
        return peer in self._waiting or (self.ranks is not None and peer in self.ranks.peers)

    def handle_hello(self, peer: PeerId, message: RankHello, now_s: float) -> None:
        """Add a spare process; the spare world ends if the process replaces one of it.

        Args:
            peer: the process.
            message: its hello.
            now_s: the monotonic time in seconds.
        """
        for other in list(self._waiting.values()):
            # One that waits beside a newer one of its rank may have taken its place already, with
            # the message still on its way.
            if is_same_process(message, other.hello):
                del self._waiting[other.peer]
        if self.ranks is not None and (replaced := self.ranks.explain_replacement(message)):
            self.end(replaced, now_s)
        self._waiting[peer] = RankProcess(peer, message)

    def choose(self) -> list[RankProcess] | None:
        """Return a spare process for each rank, in rank order, if the spare world may begin."""
        if self.ranks is not None or self._starts_failed >= STARTS_MAX:
            return None
        return assign_ranks(self._waiting.values(), self._config.world.size)

    def begin(self, ranks: EpochRanks) -> None:
        """Begin with the processes that `choose` has returned."""
        self.ranks = ranks
        for peer in ranks.peers:
            del self._waiting[peer]
        fields = {"spare_epoch": ranks.epoch, "ranks": len(ranks.peers)}
        self._actions.append(WriteLog("info", "spare_world_begins", fields))

    def handle_ready(self, peer: PeerId, message: RankReady, now_s: float) -> None:
        """Record that a process of the spare world has loaded; end that world if some differ.

        Args:
            peer: the process, which has a rank in it.
            message: its report.
            now_s: the monotonic time in seconds.
        """
        assert self.ranks is not None
        ranks = self.ranks
        ranks.note_ready(peer, message)
        if problem := ranks.explain_mismatch() or ranks.explain_difference():
            self.end(problem, now_s)
        elif ranks.is_loaded:
            self._starts_failed = 0
            self._passed_canary.note(ranks.backend, ranks.hellos, now_s)
            fields = {"spare_epoch": ranks.epoch, "seconds": round(ranks.age_s(now_s), 1)}
            self._actions.append(WriteLog("info", "spare_world_ready", fields))

    def check_deadlines(self, now_s: float) -> None:
        """End the spare world if its processes have not joined or loaded in time.

        Args:
            now_s: the monotonic time in seconds.
        """
        if self.ranks is not None and not self.ranks.is_loaded:
            overdue = self.ranks.overdue_reason(now_s, self._config.scheduler)
            if overdue is not None:
                self.end(overdue, now_s)

    def remove(self, peer: PeerId) -> RankProcess | None:
        """Remove a process that waits for a spare world, and return it; None if it does not."""
        return self._waiting.pop(peer, None)

    def end(self, cause: str, now_s: float, lost: PeerId | None = None) -> None:
        """End the spare world, if there is one: its processes leave, and others are started.

        Args:
            cause: why, one sentence.
            now_s: the monotonic time in seconds.
            lost: one of its processes, which has ended or cannot be reached; None: none is known.
        """
        if self.ranks is None:
            return
        ranks, self.ranks = self.ranks, None
        self._starts_failed += not ranks.is_loaded
        if lost is not None and (member := ranks.remove(lost)) is not None:
            self._dismissed.add(member, now_s)
        fields: dict[str, object] = {"spare_epoch": ranks.epoch, "cause": cause}
        self._actions.append(WriteLog("warning", "spare_world_ended", fields))
        if self._starts_failed == STARTS_MAX:
            detail = (
                f"{STARTS_MAX} starts in a row have failed, so spare processes load no model until "
                'the scheduler is restarted: set rank_worker.spare to "started" if memory lacks.'
            )
            self._actions.append(WriteLog("error", "spare_world_abandoned", {"detail": detail}))
        ranks.dismiss(cause, now_s, self._dismissed)

    def take(self, backend: Backend, now_s: float) -> EpochRanks | None:
        """Return the processes of the spare world, which serve from now on; None without one.

        Args:
            backend: of the next epoch. A spare world with another one ends.
            now_s: the monotonic time in seconds.
        """
        if self.ranks is not None and self.ranks.backend != backend:
            self.end(f"The next epochs use {backend}.", now_s)
        ranks, self.ranks = self.ranks, None
        return ranks

    def explain(self) -> str:
        """Return what the spare processes do, in words; "" without spare processes that load."""
        if self.ranks is None:
            return "not loaded: too many starts failed" if self._starts_failed >= STARTS_MAX else ""
        if self.ranks.is_loaded:
            return "loaded"
        return f"loading, {100 * self.ranks.loaded:.0f} %"
