"""What epochs that failed have taught: whether to try again, over what, in how much memory. Pure.

An epoch has failed when it ended, by anything but an order to stop, before it was ready, or with
work to do and without a single token for anybody. That is the normal answer to every fault, so one
alone means nothing; several in a row mean that trying again does not help. What ends a world that
serves costs a pause, however often: the next token shows that going on is right.

Where something is missing that may come by itself (a network after a power cut, a hub), epochs do
not count: whoever starts the ranks does it ever more slowly, and the reason is told meanwhile.
"""

import dataclasses
from collections import deque
from typing import Literal

from services.scheduler.cache.kv_rows import RowBudget
from services.scheduler.events import Action, Say
from shared.configuration.settings import Config
from shared.identifiers import Epoch
from shared.messages import RankFailed
from shared.messages.rank_link import Backend

Failure = Literal["", "configuration", "epochs"]

Ending = Literal["", "canary", "apart", "unavailable"]
"""Why an epoch has failed: for any reason, by wrong sums, because its ranks did not reach each
other, or because a service elsewhere did not answer."""

JACCL_STARTS_MAX = 3
"""So many starts in a row that ended before the world was ready show that a cable, a port or a
driver is at fault, not chance (a queue pair of the process before may still be held)."""

CANARIES_MAX = 2
"""So many failed canaries, with none that passed between them, are no chance. Wrong sums never
serve, so the only question is how soon somebody is told."""

_KV_SHARE = 0.8
"""What an epoch that ran out of device memory leaves to the next one's KV."""

_DETAIL_CHARS = 4_000
"""A sentence that quotes a rank's must still fit a message."""


@dataclasses.dataclass(frozen=True, slots=True)
class FailedEpoch:
    """An epoch that has failed, as far as it is known."""

    epoch: Epoch
    cause: str
    """One sentence."""
    was_ready: bool
    """All its ranks had loaded."""
    ending: Ending = ""
    no_ring: str = ""
    """Why its processes could not be joined over ring; "" when they could."""


class Recovery:
    """Remembers failed epochs; says how the next one begins, or that there is none."""

    def __init__(self, config: Config, out: list[Action]) -> None:
        """Begin with nothing learnt.

        Args:
            config: the whole configuration.
            out: where actions go.
        """
        self.backend: Backend = config.backend
        """Which backend the next epoch uses."""
        self.failure: Failure = ""
        """Why there is no next epoch; "" while there is one."""
        self.detail = ""
        """The same as a sentence."""
        self.memory_exhausted = 0
        """Epochs that ended because a device had no memory left."""
        self._scheduler = config.scheduler
        self._may_use_ring = config.world.jaccl_fallback == "ring"
        self._out = out
        self._failed_at_s: deque[float] = deque()
        self._last: FailedEpoch | None = None
        """The last one that has failed, and none was ready since."""
        self._starts_failed = 0
        self._canaries_failed = 0
        self._kv_bytes_max: int | None = None

    def give_up(self, failure: Failure, detail: str) -> None:
        """Try no further epoch; the first reason stands."""
        if not self.failure:
            self.failure = failure
            self.detail = detail[:_DETAIL_CHARS]
            self._say("error", "given_up", failure=failure, detail=self.detail)

    def served(self) -> None:
        """Take in that tokens have left: what failed before is forgiven."""
        self._failed_at_s.clear()

    def was_ready(self) -> None:
        """Take in that the ranks of this epoch have loaded, and compute what they must."""
        self._canaries_failed = 0
        self._last = None

    def explain(self) -> str:
        """Return why the last epoch has failed, to be added to what is done now; "": it has not."""
        if self._last is None:
            return ""
        return f" The last epoch has failed: {self._last.cause}"[: _DETAIL_CHARS - 100]

    def epoch_failed(self, failed: FailedEpoch, now_s: float) -> None:
        """Take in that an epoch has failed."""
        self._last = failed
        if failed.ending not in ("apart", "unavailable"):
            self._count(failed, now_s)
        if self.failure or failed.ending == "unavailable":
            return
        self._starts_failed = 0 if failed.was_ready else self._starts_failed + 1
        if failed.ending == "canary":
            self._canary_failed(failed)
        elif self._starts_failed >= JACCL_STARTS_MAX:
            starts = f"{self._starts_failed} starts of jaccl in a row have failed"
            self._leave_jaccl(starts, failed)

    def heard_late(self, message: RankFailed, ending: Ending) -> None:
        """Take in what another rank says of the epoch that has failed last.

        Whose collectives fail is often heard before the one that knows why.
        """
        failed = self._last
        if failed is None or failed.epoch != message.epoch or failed.ending or not ending:
            return
        cause = f"Rank {message.rank} failed: {message.detail}"
        self._last = failed = dataclasses.replace(failed, cause=cause, ending=ending)
        if self.failure:
            return
        if ending == "canary":
            self._canary_failed(failed)
        else:
            self._failed_at_s.pop()
            self._starts_failed = max(0, self._starts_failed - 1)

    def _count(self, failed: FailedEpoch, now_s: float) -> None:
        """End all trying when too many have failed in too little time."""
        window_s = self._scheduler.epochs_failed_window_s
        times = self._failed_at_s
        times.append(now_s)
        while now_s - times[0] > window_s:
            times.popleft()
        if len(times) >= self._scheduler.epochs_failed_max:
            count = "1 epoch has" if len(times) == 1 else f"{len(times)} epochs have"
            self.give_up(
                "epochs",
                f"{count} failed within {now_s - times[0]:.0f} s, so no other is tried until the "
                f"scheduler is restarted. The last one: {failed.cause}",
            )

    def _canary_failed(self, failed: FailedEpoch) -> None:
        self._canaries_failed += 1
        if self._leave_jaccl("the canary has failed over jaccl", failed):
            self._canaries_failed = 0
        elif self._canaries_failed >= CANARIES_MAX:
            self.give_up(
                "epochs",
                f"The ranks compute wrong numbers together, {self._canaries_failed} starts in "
                "a row: check cables and ports with `lockstep doctor`, or set another "
                f"world.backend, then restart the scheduler. The last one: {failed.cause}",
            )

    def memory_ran_out(self, kv_bytes: int) -> None:
        """Take in that the present epoch's ranks cannot hold the KV that they were given."""
        self.memory_exhausted += 1
        self._kv_bytes_max = int(_KV_SHARE * kv_bytes)
        self._say("warning", "kv_budget_reduced", was_bytes=kv_bytes, bytes_max=self._kv_bytes_max)

    def bounded(self, budget: RowBudget) -> RowBudget:
        """Return a world's budget, no larger than what earlier epochs have shown to fit."""
        if self._kv_bytes_max is None or budget.bytes_max <= self._kv_bytes_max:
            return budget
        return dataclasses.replace(budget, bytes_max=self._kv_bytes_max)

    def _leave_jaccl(self, why: str, failed: FailedEpoch) -> bool:
        """Use ring from here on, if that is allowed and possible; tell whether it is."""
        if self.backend != "jaccl" or not self._may_use_ring:
            return False
        if failed.no_ring:
            cause = f"{why}, but ring is not possible. {failed.no_ring}"
            self._say("warning", "backend_not_changed", backend="jaccl", cause=cause)
            return False
        self.backend = "ring"
        cause = f"{why}; the next epochs use ring, which is slower."
        self._say("warning", "backend_changed", backend="ring", cause=cause)
        return True

    def _say(self, level: str, event: str, **fields: object) -> None:
        self._out.append(Say(level, event, fields))
