"""What epochs that failed have taught: whether to try again, over what, in how much memory. Pure.

An epoch has failed when it ended, by anything but an order to stop, before it was ready, or with
work to do and without a single token for anybody. That is the normal answer to every fault, so one
alone means nothing; several in a row mean that trying again does not help. What ends a world that
serves costs a pause, however often: the next token shows that going on is right.
"""

import dataclasses
from collections import deque
from typing import Literal

from services.scheduler.events import Action, Say
from services.scheduler.rows import RowBudget
from shared.messages.rank_link import Backend
from shared.settings import Config

Failure = Literal["", "configuration", "epochs"]

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

    def canary_passed(self) -> None:
        """Take in that the ranks of this epoch compute alike, and what they must."""
        self._canaries_failed = 0

    def epoch_failed(
        self,
        cause: str,
        now_s: float,
        *,
        was_ready: bool,
        has_ports: bool,
        failed_canary: bool = False,
    ) -> None:
        """Take in that an epoch has failed.

        Args:
            cause: why, one sentence.
            now_s: the time.
            was_ready: all its ranks had loaded.
            has_ports: all its ranks had named a data address.
            failed_canary: it computed wrong numbers.
        """
        window_s = self._scheduler.epochs_failed_window_s
        failed = self._failed_at_s
        failed.append(now_s)
        while now_s - failed[0] > window_s:
            failed.popleft()
        if len(failed) >= self._scheduler.epochs_failed_max:
            count = "1 epoch has" if len(failed) == 1 else f"{len(failed)} epochs have"
            self.give_up(
                "epochs",
                f"{count} failed within {now_s - failed[0]:.0f} s, so no other is tried until the "
                f"scheduler is restarted. The last one: {cause}",
            )
            return
        self._starts_failed = 0 if was_ready else self._starts_failed + 1
        if failed_canary:
            self._canaries_failed += 1
            if self._leave_jaccl("the canary has failed over jaccl", has_ports=has_ports):
                self._canaries_failed = 0
            elif self._canaries_failed >= CANARIES_MAX:
                self.give_up(
                    "epochs",
                    f"The ranks compute wrong numbers together, {self._canaries_failed} starts in "
                    "a row: check cables and ports with `lockstep doctor`, or set another "
                    f"world.backend, then restart the scheduler. The last one: {cause}",
                )
        elif self._starts_failed >= JACCL_STARTS_MAX:
            starts = f"{self._starts_failed} starts of jaccl in a row have failed"
            self._leave_jaccl(starts, has_ports=has_ports)

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

    def _leave_jaccl(self, why: str, *, has_ports: bool) -> bool:
        """Use ring from here on, if that is allowed and possible; tell whether it is."""
        if self.backend != "jaccl" or not self._may_use_ring:
            return False
        if has_ports:
            self.backend = "ring"
            cause = f"{why}; the next epochs use ring, which is slower."
            self._say("warning", "backend_changed", backend="ring", cause=cause)
        else:
            # mlx.launch has set their environment, and that is for jaccl.
            cause = f"{why}, but some ranks have no address for ring: another launcher set them."
            self._say("warning", "backend_not_changed", backend="jaccl", cause=cause)
        return has_ports

    def _say(self, level: str, event: str, **fields: object) -> None:
        self._out.append(Say(level, event, fields))
