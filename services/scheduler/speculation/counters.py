"""What is told about drafts, in Prometheus' names."""

from collections import defaultdict

from services.scheduler.speculation.method import Method
from shared import limits


class DraftCounters:
    """Counts of the scheduler's life, all methods together and one by one.

    Mean accepted length: `drafts_accepted_total / drafted_rows_total`. Tokens per row and step:
    one more. Acceptance of a method at position i: `drafts_METHOD_accepted_at_i_total /
    drafts_METHOD_proposed_at_i_total`.
    """

    def __init__(self) -> None:
        # Reported from the start, so that whoever watches sees them begin at 0.
        names = ("drafted_rows", "drafted_steps", "drafts_proposed", "drafts_accepted")
        self._counts = defaultdict[str, float](float, {f"{name}_total": 0.0 for name in names})
        self._proposed_at: dict[Method, list[int]] = {}
        self._accepted_at: dict[Method, list[int]] = {}

    def verified(self, method: Method, proposed: int, accepted: int) -> None:
        """Count one row whose drafts were verified; `accepted` of them came true."""
        counts = self._counts
        counts["drafted_rows_total"] += 1
        counts["drafts_proposed_total"] += proposed
        counts["drafts_accepted_total"] += accepted
        counts["drafted_tokens_total"] += accepted + 1
        counts[f"drafts_{method}_rows_total"] += 1
        counts[f"drafts_{method}_proposed_total"] += proposed
        counts[f"drafts_{method}_accepted_total"] += accepted
        nothing = [0] * limits.DRAFT_TOKENS_MAX
        proposed_at = self._proposed_at.setdefault(method, list(nothing))
        accepted_at = self._accepted_at.setdefault(method, list(nothing))
        for position in range(proposed):
            proposed_at[position] += 1
        for position in range(accepted):
            accepted_at[position] += 1

    def planned(self, *, has_drafts: bool, was_held: bool, read: int = 0) -> None:
        """Count one plan; `read`: tokens that draft rows read in it."""
        self._counts["drafted_steps_total"] += has_drafts
        self._counts["held_plans_total"] += was_held
        if read:
            self._counts["draft_tokens_read_total"] += read

    def report(self) -> dict[str, float]:
        """Return all counters by name; positions that never had a draft are left out."""
        report = dict(self._counts)
        for method, proposed_at in self._proposed_at.items():
            for position, proposed in enumerate(proposed_at):
                if proposed:
                    accepted = self._accepted_at[method][position]
                    report[f"drafts_{method}_proposed_at_{position}_total"] = float(proposed)
                    report[f"drafts_{method}_accepted_at_{position}_total"] = float(accepted)
        return report
