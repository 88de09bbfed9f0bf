"""What is told about drafts, in Prometheus' names."""

from collections import defaultdict

from shared import limits


class DraftCounters:
    """Counts of the scheduler's life.

    Mean accepted length: `drafts_accepted_total / drafted_rows_total`. Tokens per row and step:
    one more. Acceptance at position i: `drafts_accepted_at_i_total / drafts_proposed_at_i_total`.
    """

    def __init__(self) -> None:
        # Reported from the start, so that whoever watches sees them begin at 0.
        names = ("drafted_rows", "drafted_steps", "drafts_proposed", "drafts_accepted")
        self._counts = defaultdict[str, float](float, {f"{name}_total": 0.0 for name in names})
        self._proposed_at = [0] * limits.DRAFT_TOKENS_MAX
        self._accepted_at = [0] * limits.DRAFT_TOKENS_MAX

    def verified(self, method: str, proposed: int, accepted: int) -> None:
        """Count one row whose drafts were verified; `accepted` of them came true."""
        counts = self._counts
        counts["drafted_rows_total"] += 1
        counts["drafts_proposed_total"] += proposed
        counts["drafts_accepted_total"] += accepted
        counts["drafted_tokens_total"] += accepted + 1
        counts[f"drafts_{method}_proposed_total"] += proposed
        counts[f"drafts_{method}_accepted_total"] += accepted
        for position in range(proposed):
            self._proposed_at[position] += 1
        for position in range(accepted):
            self._accepted_at[position] += 1

    def planned(self, *, has_drafts: bool, was_held: bool) -> None:
        """Count one plan."""
        self._counts["drafted_steps_total"] += has_drafts
        self._counts["held_plans_total"] += was_held

    def report(self) -> dict[str, float]:
        """Return all counters by name; positions that never had a draft are left out."""
        report = dict(self._counts)
        for position, proposed in enumerate(self._proposed_at):
            if proposed:
                report[f"drafts_proposed_at_{position}_total"] = float(proposed)
                report[f"drafts_accepted_at_{position}_total"] = float(self._accepted_at[position])
        return report
