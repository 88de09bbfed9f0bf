"""Recovery. Owns whether the next epoch starts, its backend and its KV memory. Pure.

An epoch has failed if it ended before it was ready, or with running sequences but without a token,
and not because the scheduler stops. Every fault ends an epoch, so one failed epoch is normal;
several in a row mean that another start will not help. Epochs that produced tokens never count, no
matter how often they end.

Epochs that fail because a service is missing that may return (a network after a power cut, a model
hub) do not count either: the supervisor starts ranks more and more slowly, and the status says why.
"""

import dataclasses
from collections import deque
from typing import Literal

from services.scheduler.cache.kv_rows import RowBudget
from services.scheduler.events import Action, WriteLog
from shared.configuration.settings import Config
from shared.identifiers import Epoch
from shared.messages import RankFailed
from shared.messages.rank_link import Backend

AbandonCause = Literal["", "configuration", "epochs"]

FailureKind = Literal["", "canary", "unreachable", "unavailable"]
"""Why an epoch has failed: for any other reason, by wrong results in the canary, because its ranks
could not reach each other, or because an external service was unavailable."""

JACCL_STARTS_MAX = 3
"""Failed starts in a row after which jaccl is considered broken. One may fail by chance, as when a
queue pair of the process before is still held."""

CANARIES_MAX = 2
"""Failed canaries in a row after which no epoch is started. Wrong results are never served, so this
only decides how soon the operator is told."""

_KV_SHARE = 0.8
"""Part of the KV budget that is left after an epoch ran out of device memory."""

_DETAIL_CHARS = 4_000
"""Longest detail, so that a sentence that quotes a rank fits a message."""


@dataclasses.dataclass(frozen=True, slots=True)
class FailedEpoch:
    """An epoch that ended before it was ready, or with running sequences but without a token."""

    epoch: Epoch
    cause: str
    """Why it ended, one sentence."""
    was_ready: bool
    """All its ranks had loaded."""
    kind: FailureKind = ""
    """Kind of its failure, as far as it is known."""
    ring_obstacle: str = ""
    """Why its processes cannot use the ring backend; "" if they can."""
    is_symptom: bool = False
    """The cause may be the consequence of what another rank reports later: a rank was silent or
    late, or only said that another one had ended."""


class Recovery:
    """Counts failed epochs; decides whether the next starts, its backend and its KV memory."""

    def __init__(self, config: Config, actions: list[Action]) -> None:
        """Start without failed epochs.

        Args:
            config: the whole configuration.
            actions: the list to which actions are appended.
        """
        self.backend: Backend = config.backend
        """Backend of the next epoch."""
        self.failure: AbandonCause = ""
        """Why no further epoch starts; "" while one may."""
        self.memory_exhausted = 0
        """Epochs that ended because a device had no memory left."""
        self._scheduler = config.scheduler
        self._may_use_ring = config.world.jaccl_fallback == "ring"
        self._actions = actions
        self._failed_at_s: deque[float] = deque()
        self._why_abandoned = ""
        """The same as a sentence; with too many failed epochs the cause of the last one follows."""
        self._last: FailedEpoch | None = None
        """The last failed epoch, if no epoch was ready since."""
        self._starts_failed = 0
        self._canaries_failed = 0
        self._kv_bytes_max: int | None = None

    @property
    def detail(self) -> str:
        """Why no further epoch starts, as a sentence; "" while one may.

        It quotes the present knowledge of the last failed epoch: the rank that knows the cause may
        report after the rank that felt the consequence.
        """
        quoted = (
            f" The last one: {self._last.cause}" if self.failure == "epochs" and self._last else ""
        )
        return f"{self._why_abandoned}{quoted}"[:_DETAIL_CHARS]

    def abandon_start(self, failure: AbandonCause, detail: str) -> None:
        """Rule out all further epochs until the scheduler is restarted.

        Only the first call counts, except that a wrong configuration explains failed epochs.

        Args:
            failure: kind of the cause, for the status.
            detail: a sentence for the operator.
        """
        if not self.failure or (self.failure, failure) == ("epochs", "configuration"):
            self.failure = failure
            self._why_abandoned = detail
            self._log("error", "world_start_abandoned", failure=failure, detail=self.detail)

    def note_progress(self) -> None:
        """Clear the count of failed epochs, because the current epoch has produced tokens."""
        self._failed_at_s.clear()

    def note_ready(self) -> None:
        """Forget the last failed epoch and failed canaries, because the ranks passed the canary."""
        self._canaries_failed = 0
        self._last = None

    def explain(self) -> str:
        """Return a sentence on why the last epoch has failed; "" if it has not.

        It begins with a space, since it follows another sentence.
        """
        if self._last is None:
            return ""
        return f" The last epoch has failed: {self._last.cause}"[: _DETAIL_CHARS - 100]

    def epoch_failed(self, failed: FailedEpoch, now_s: float) -> None:
        """Record a failed epoch, which may change the backend or rule out further epochs.

        Args:
            failed: the epoch.
            now_s: when it ended, in seconds; failures longer ago than epochs_failed_window_s are
                not counted.
        """
        self._last = failed
        if failed.kind not in ("unreachable", "unavailable"):
            self._count(now_s)
        if self.failure or failed.kind == "unavailable":
            return
        self._starts_failed = 0 if failed.was_ready else self._starts_failed + 1
        if failed.kind == "canary":
            self._canary_failed(failed)
        elif self._starts_failed >= JACCL_STARTS_MAX:
            starts = f"{self._starts_failed} starts of jaccl in a row have failed"
            self._fall_back_to_ring(starts, failed)

    def note_late_failure(self, message: RankFailed, kind: FailureKind) -> None:
        """Correct the cause of the last failed epoch by a later report of another of its ranks.

        A rank whose collectives fail often reports before the rank that knows the cause. A report
        replaces a symptom, and a cause of which the kind is not known by one of which it is.

        Args:
            message: that rank's report; one of an older epoch has no effect.
            kind: the kind of failure that it reports; "" is not known.
        """
        failed = self._last
        if failed is None or failed.epoch != message.epoch or message.cause == "peer":
            return
        if not (failed.is_symptom or (kind and not failed.kind)):
            return
        cause = f"Rank {message.rank} failed: {message.detail}"
        self._log("warning", "epoch_explained", epoch=failed.epoch, cause=cause, seen=failed.cause)
        self._last = failed = dataclasses.replace(failed, cause=cause, kind=kind, is_symptom=False)
        if self.failure or not kind:
            return
        if kind == "canary":
            self._canary_failed(failed)
        else:
            self._failed_at_s.pop()
            self._starts_failed = max(0, self._starts_failed - 1)

    def _count(self, now_s: float) -> None:
        """Start no further epoch if too many have failed within the window."""
        window_s = self._scheduler.epochs_failed_window_s
        times = self._failed_at_s
        times.append(now_s)
        while now_s - times[0] > window_s:
            times.popleft()
        if len(times) >= self._scheduler.epochs_failed_max:
            count = "1 epoch has" if len(times) == 1 else f"{len(times)} epochs have"
            self.abandon_start(
                "epochs",
                f"{count} failed within {now_s - times[0]:.0f} s, so no other is tried until the "
                "scheduler is restarted.",
            )

    def _canary_failed(self, failed: FailedEpoch) -> None:
        self._canaries_failed += 1
        if self._fall_back_to_ring("the canary has failed over jaccl", failed):
            self._canaries_failed = 0
        elif self._canaries_failed >= CANARIES_MAX:
            self.abandon_start(
                "epochs",
                f"The ranks compute wrong numbers together, {self._canaries_failed} starts in "
                "a row: check cables and ports with `lockstep doctor`, or set another "
                "world.backend, then restart the scheduler.",
            )

    def reduce_kv_budget(self, kv_bytes: int) -> None:
        """Reduce the KV budget of later epochs, because a rank ran out of device memory.

        Args:
            kv_bytes: the budget with which it ran out, in bytes per rank; a fifth is taken off.
        """
        self.memory_exhausted += 1
        self._kv_bytes_max = int(_KV_SHARE * kv_bytes)
        self._log("warning", "kv_budget_reduced", was_bytes=kv_bytes, bytes_max=self._kv_bytes_max)

    def limit_budget(self, budget: RowBudget) -> RowBudget:
        """Return a KV budget, reduced if an earlier epoch ran out of device memory with as much.

        Args:
            budget: what the ranks of this epoch report.
        """
        if self._kv_bytes_max is None or budget.bytes_max <= self._kv_bytes_max:
            return budget
        return dataclasses.replace(budget, bytes_max=self._kv_bytes_max)

    def _fall_back_to_ring(self, why: str, failed: FailedEpoch) -> bool:
        """Use the ring backend from now on if allowed and possible; return whether it is."""
        if self.backend != "jaccl" or not self._may_use_ring:
            return False
        if failed.ring_obstacle:
            cause = f"{why}, but ring is not possible. {failed.ring_obstacle}"
            self._log("warning", "backend_not_changed", backend="jaccl", cause=cause)
            return False
        self.backend = "ring"
        cause = f"{why}; the next epochs use ring, which is slower."
        self._log("warning", "backend_changed", backend="ring", cause=cause)
        return True

    def _log(self, level: str, event: str, **fields: object) -> None:
        self._actions.append(WriteLog(level, event, fields))


def failure_kind_of(message: RankFailed, *, is_joining: bool) -> FailureKind:
    """Return the kind of failure that a rank's report shows.

    Args:
        message: the report.
        is_joining: the rank had not joined, so that only another rank could be unreachable.
    """
    if message.cause == "unavailable":
        return "unreachable" if is_joining else "unavailable"
    return "canary" if message.cause == "canary" else ""
