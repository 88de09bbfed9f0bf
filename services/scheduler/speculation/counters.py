"""Counts of drafts. Owns what `StatusReported` says about speculation; decides nothing."""

from services.scheduler.speculation.methods import Method
from shared import limits
from shared.messages import DraftStatistics


class DraftCounters:
    """Counts since the scheduler started: drafts by method and position, plans, tokens read."""

    def __init__(self) -> None:
        self.totals = {
            "drafted_steps_total": 0.0,
            "held_plans_total": 0.0,
            "draft_tokens_read_total": 0.0,
        }
        """Plans with drafts, plans held back, and tokens read by rows of the draft model."""
        self._rows: dict[Method, int] = {}
        self._proposed_at: dict[Method, list[int]] = {}
        self._accepted_at: dict[Method, list[int]] = {}

    def verified(self, method: Method, proposed: int, accepted: int) -> None:
        """Count one row whose drafts were verified, and its drafts by method and position.

        Args:
            method: the method that proposed the drafts.
            proposed: drafts in the row.
            accepted: how many of them, from the first, were accepted.
        """
        self._rows[method] = self._rows.get(method, 0) + 1
        zeros = [0] * limits.DRAFT_TOKENS_MAX
        proposed_at = self._proposed_at.setdefault(method, list(zeros))
        accepted_at = self._accepted_at.setdefault(method, list(zeros))
        for position in range(proposed):
            proposed_at[position] += 1
        for position in range(accepted):
            accepted_at[position] += 1

    def planned(self, *, has_drafts: bool, was_held: bool, read: int = 0) -> None:
        """Count one plan, in the totals of plans with drafts, plans held back and tokens read.

        Args:
            has_drafts: it has drafts.
            was_held: it was held back for the results of plans in flight.
            read: number of tokens that rows of the draft model read in it.
        """
        self.totals["drafted_steps_total"] += has_drafts
        self.totals["held_plans_total"] += was_held
        self.totals["draft_tokens_read_total"] += read

    def statistics(self) -> list[DraftStatistics]:
        """Return the proposed and accepted drafts by position, one entry per method, by its name.

        Positions after the last one that had a draft are left out.
        """
        return [self._statistics_of(method, rows) for method, rows in sorted(self._rows.items())]

    def _statistics_of(self, method: Method, rows: int) -> DraftStatistics:
        used = sum(count > 0 for count in self._proposed_at[method])
        return DraftStatistics(
            method=method,
            rows=rows,
            proposed_at=self._proposed_at[method][:used],
            accepted_at=self._accepted_at[method][:used],
        )
