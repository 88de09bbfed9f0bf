"""The rank processes of one epoch, from the order to join until they are dismissed. Pure."""

from collections.abc import Sequence
from typing import Literal

from services.scheduler.events import Action, AllowSilence, SendToRanks
from services.scheduler.world.canary_comparison import explain_difference, explain_mismatch
from services.scheduler.world.dismissed_ranks import DismissedRanks
from services.scheduler.world.late_ranks import explain_lateness
from services.scheduler.world.members import RankProcess, is_same_process, replaces
from shared.configuration.settings import SchedulerConfig
from shared.identifiers import Epoch, PeerId
from shared.messages import JoinWorld, LeaveWorld, RankHello, RankLoading, RankReady
from shared.messages.rank_link import Backend


class EpochRanks:
    """The processes that have the ranks of one epoch, with their reports."""

    def __init__(
        self,
        epoch: Epoch,
        backend: Backend,
        chosen: Sequence[RankProcess],
        orders: Sequence[JoinWorld],
        now_s: float,
        actions: list[Action],
    ) -> None:
        """Give each process its rank, and order it to join.

        Args:
            epoch: the epoch that begins.
            backend: of its collectives.
            chosen: the processes, in rank order.
            orders: theirs, in rank order.
            now_s: the monotonic time in seconds.
            actions: the list to which actions are appended.
        """
        self.epoch = epoch
        self.backend: Backend = backend
        self.has_whole_canary = all(one.canary_prompt for one in orders)
        """Their canary has its long prompt."""
        self.were_spares = False
        """They had not loaded as spares when they became the ranks of the current epoch."""
        self.ring_obstacle = ""
        """Why these processes cannot use the ring backend; "" if they can."""
        self._members = {member.peer: member for member in chosen}
        self._actions = actions
        self._began_at_s = now_s
        # Until they have joined, only the deadline for joining counts.
        actions.append(AllowSilence(tuple(self._members), is_allowed=True))
        for rank, (member, order) in enumerate(zip(chosen, orders, strict=True)):
            member.rank = rank
            actions.append(SendToRanks((member.peer,), order, epoch))

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The processes that are not lost, in rank order."""
        return tuple(self._members)

    @property
    def members(self) -> list[RankProcess]:
        """These processes, with their reports."""
        return list(self._members.values())

    @property
    def hellos(self) -> list[RankHello]:
        """Their first messages, in rank order."""
        return [member.hello for member in self._members.values()]

    @property
    def is_loaded(self) -> bool:
        """Whether all of them have loaded."""
        return all(member.state == "ready" for member in self._members.values())

    @property
    def loaded(self) -> float:
        """Part of the model that each of them has loaded at least, 0 to 1."""
        return min((member.loaded for member in self._members.values()), default=0.0)

    def find(self, peer: PeerId) -> RankProcess | None:
        """Return the process of a peer; None if it has no rank in this epoch."""
        return self._members.get(peer)

    def remove(self, peer: PeerId) -> RankProcess | None:
        """Remove a process that is lost, and return it; None if it had no rank here."""
        return self._members.pop(peer, None)

    def explain_replacement(self, hello: RankHello) -> str | None:
        """Return why the epoch must end if a process replaces or is one of these; else None.

        Args:
            hello: its first message.
        """
        for member in self._members.values():
            if replaces(hello, member.hello):
                return f"Rank {member.rank} was started again (process {hello.pid})."
            if is_same_process(hello, member.hello):
                return f"Rank {member.rank} has lost its connection (process {hello.pid})."
        return None

    def reports(self) -> list[RankReady]:
        """Return the reports of those that have loaded, in rank order."""
        return [one.ready for one in self._members.values() if one.ready is not None]

    def note_loading(self, peer: PeerId, message: RankLoading) -> None:
        """Record how far a process has joined and loaded, for the status and the deadlines."""
        member = self._members.get(peer)
        if member is None or member.state == "ready":
            return
        is_joining = message.stage in ("joining", "init")
        if not is_joining:
            self.judge_silence(member)
        member.is_in_init = message.stage == "init"
        member.state = "joining" if is_joining else "loading"
        member.loaded = message.loaded

    def note_ready(self, peer: PeerId, message: RankReady) -> None:
        """Record that a process has loaded."""
        member = self._members[peer]
        self.judge_silence(member)
        member.ready = message
        member.state = "ready"
        member.loaded = 1.0

    def explain_mismatch(self) -> str | None:
        """Return how those that have loaded differ in model or settings; None if they do not."""
        hosts = [one.hello.host for one in self._members.values() if one.ready is not None]
        return explain_mismatch(self.reports(), hosts)

    def explain_difference(self) -> str | None:
        """Return how their canaries differ; None if they do not, or some have not loaded."""
        return explain_difference(self.reports()) if self.is_loaded else None

    def overdue_reason(self, now_s: float, settings: SchedulerConfig) -> str | None:
        """Return a sentence if they have not joined or loaded before the deadline, else None.

        Args:
            now_s: the monotonic time in seconds.
            settings: the deadlines.
        """
        return explain_lateness(self.members, self.age_s(now_s), self.backend, settings)

    def age_s(self, now_s: float) -> float:
        """Return the seconds since they were ordered to join."""
        return now_s - self._began_at_s

    def extend_deadlines(self, seconds: float, now_s: float) -> None:
        """Postpone the deadlines of joining and loading; see `World.extend_deadlines`."""
        self._began_at_s = min(now_s, self._began_at_s + seconds)

    def judge_silence(self, member: RankProcess) -> None:
        """End the time in which a joining rank may be silent."""
        if member.state == "joining":
            self._actions.append(AllowSilence((member.peer,), is_allowed=False))

    def dismiss(
        self, cause: str, now_s: float, dismissed: DismissedRanks, *, is_canary: bool = False
    ) -> None:
        """Tell all processes to leave; the epoch ends.

        Args:
            cause: why, one sentence for the ranks.
            now_s: the monotonic time in seconds, from which they are listed as dismissed.
            dismissed: gets the processes.
            is_canary: their canary has failed.
        """
        if self._members:
            kind: Literal["canary", "other"] = "canary" if is_canary else "other"
            leave = LeaveWorld(epoch=self.epoch, detail=cause[:4_000], cause=kind)
            self._actions.append(SendToRanks(self.peers, leave, self.epoch))
        for member in self._members.values():
            self.judge_silence(member)
            dismissed.add(member, now_s)
        self._members.clear()
