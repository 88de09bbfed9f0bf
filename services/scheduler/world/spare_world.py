"""The spare world: spare processes of all ranks that load while the world before them serves. Pure.

Once each rank has a spare process that said hello, they begin an epoch of their own: they join,
load and pass the canary as any world does, and wait. When the serving epoch ends, theirs follows
it, so no weights are read while streams wait.
"""

from collections.abc import Callable, Sequence

from services.scheduler.events import Action, WriteLog
from services.scheduler.world.dismissed_ranks import DismissedRanks
from services.scheduler.world.epoch_ranks import EpochRanks
from services.scheduler.world.members import RankProcess, assign_ranks, is_same_process
from services.scheduler.world.passed_canary import PassedCanary
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.identifiers import PeerId
from shared.messages import RankFailed, RankHello, RankReady
from shared.messages.rank_link import Backend

STARTS_MAX = 3
"""Failed starts in a row after which no spare world is begun for `RETRY_S`: a lack of memory mostly
does not pass."""
RETRY_S = 600.0
"""Time without a start after that."""


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
        self._has_passed = False
        """The spare world has loaded, and its ranks agree."""
        self._doubts = 0
        """Canaries that were in doubt when it began."""
        self._starts_failed = 0
        self._failed_at_s = 0.0

    def find(self, peer: PeerId) -> RankProcess | None:
        """Return the process of a peer in the spare world; None: it has none there."""
        return self.ranks.find(peer) if self.ranks is not None else None

    def has(self, peer: PeerId) -> bool:
        """Tell whether a peer is a spare process."""
        return peer in self._waiting or self.find(peer) is not None

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
        self.end_if_replaced(message, now_s)
        self._waiting[peer] = RankProcess(peer, message)

    def end_if_replaced(self, hello: RankHello, now_s: float) -> None:
        """End the spare world if a process's hello shows that one of its processes has ended.

        The supervisor starts no process for a rank or its spare while that runs.

        Args:
            hello: the message of a spare process or of a rank.
            now_s: the monotonic time in seconds.
        """
        if self.ranks is not None and (replaced := self.ranks.explain_replacement(hello)):
            self.end(replaced, now_s)

    def begin_if_complete(
        self, begin: Callable[[Sequence[RankProcess]], EpochRanks], now_s: float
    ) -> None:
        """Begin the spare world if each rank has a spare process.

        Args:
            begin: orders processes to join an epoch, in rank order; may raise ConfigError.
            now_s: the monotonic time in seconds.
        """
        if self._starts_failed >= STARTS_MAX and now_s - self._failed_at_s >= RETRY_S:
            self._starts_failed = 0
        if self.ranks is not None or self._starts_failed >= STARTS_MAX:
            return
        chosen = assign_ranks(self._waiting.values(), self._config.world.size)
        if chosen is None:
            return
        try:
            self.ranks = begin(chosen)
        except ConfigError as error:
            fields: dict[str, object] = {"cause": str(error)}
            self._actions.append(WriteLog("warning", "spare_world_impossible", fields))
            return
        self._has_passed, self._doubts = False, self._passed_canary.doubts
        for peer in self.ranks.peers:
            del self._waiting[peer]
        fields = {"spare_epoch": self.ranks.epoch, "ranks": len(chosen)}
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
        if mismatch := ranks.explain_mismatch():
            self.end(mismatch, now_s)
        elif difference := ranks.explain_difference():
            self.end(difference, now_s, is_canary=True)
        elif ranks.is_loaded:
            self._has_passed = True
            self.note_loaded()
            self._passed_canary.note(ranks.backend, ranks.hellos, now_s)
            fields = {"spare_epoch": ranks.epoch, "seconds": round(ranks.age_s(now_s), 1)}
            self._actions.append(WriteLog("info", "spare_world_ready", fields))

    def handle_lost(self, peer: PeerId, cause: str, now_s: float) -> None:
        """Remove a spare process whose link is lost; the spare world ends if it was in it.

        Args:
            peer: any process.
            cause: why the transport considers the link lost.
            now_s: the monotonic time in seconds.
        """
        if self.remove(peer) is None and self.find(peer) is not None:
            self.end(f"The link of a spare process is lost ({cause}).", now_s, peer)

    def handle_failed(self, peer: PeerId, message: RankFailed, now_s: float) -> bool:
        """Remove a spare process that has failed; return whether the process is one.

        The spare world ends if it was in it; a missing service that may return does not count.

        Args:
            peer: any process.
            message: its report.
            now_s: the monotonic time in seconds.
        """
        if not self.has(peer):
            return False
        if self.remove(peer) is None:
            cause = f"A spare process has failed: {message.detail}"
            self.end(cause, now_s, peer, counts=message.cause != "unavailable")
        return True

    def note_loaded(self) -> None:
        """Forget failed starts, because processes that began as spares have loaded."""
        self._starts_failed = 0

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

    def end(
        self,
        cause: str,
        now_s: float,
        lost: PeerId | None = None,
        *,
        counts: bool = True,
        is_canary: bool = False,
    ) -> None:
        """End the spare world, if there is one: its processes leave, and others are started.

        Args:
            cause: why, one sentence.
            now_s: the monotonic time in seconds.
            lost: one of its processes, which has ended or cannot be reached; None: none is known.
            counts: it is a failed start, if the spare world has not loaded.
            is_canary: its canary has failed.
        """
        if self.ranks is None:
            return
        ranks, self.ranks = self.ranks, None
        if counts and not self._has_passed:
            self._starts_failed += 1
            self._failed_at_s = now_s
        if lost is not None and (member := ranks.remove(lost)) is not None:
            self._dismissed.add(member, now_s)
        fields: dict[str, object] = {"spare_epoch": ranks.epoch, "cause": cause}
        self._actions.append(WriteLog("warning", "spare_world_ended", fields))
        if self._starts_failed == STARTS_MAX:
            detail = (
                f"{STARTS_MAX} starts in a row have failed, so spare processes load no model for "
                f'{RETRY_S:.0f} s: set rank_worker.spare to "started" if memory lacks.'
            )
            self._actions.append(WriteLog("error", "spare_world_abandoned", {"detail": detail}))
        ranks.dismiss(cause, now_s, self._dismissed, is_canary=is_canary)

    def take(self, backend: Backend, now_s: float) -> EpochRanks | None:
        """Return the processes of the spare world, which serve from now on; None without one.

        Args:
            backend: of the next epoch. A spare world with another one ends, as does one whose
                canary was not whole, if results are in doubt since it began.
            now_s: the monotonic time in seconds.
        """
        if self.ranks is not None and self.ranks.backend != backend:
            self.end(f"The next epochs use {backend}.", now_s, counts=False)
        is_in_doubt = self._passed_canary.doubts != self._doubts
        if self.ranks is not None and is_in_doubt and not self.ranks.has_whole_canary:
            # They are equal to ranks whose results were wrong, and have left out the prompt.
            self.end("The canary must run whole.", now_s, counts=False)
        ranks, self.ranks = self.ranks, None
        if ranks is not None:
            ranks.were_spares = not ranks.is_loaded
        return ranks

    def explain(self) -> str:
        """Return what the spare processes do, in words; "" without spare processes that load."""
        if self.ranks is None and self._starts_failed >= STARTS_MAX:
            return "not loaded: too many starts failed"
        if self.ranks is None:
            known = {one.hello.rank for one in self._waiting.values()}
            missing = [rank for rank in range(self._config.world.size) if rank not in known]
            text = "waiting for those of rank " + ", ".join(map(str, missing))
            return text if self._waiting and missing else ""
        if self.ranks.is_loaded:
            return "loaded"
        return f"loading, {100 * self.ranks.loaded:.0f} %"
