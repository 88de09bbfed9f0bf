"""What the ranks of an epoch report of the model: KV memory, context and vocabulary. Pure."""

from collections.abc import Callable, Sequence

from services.scheduler.cache.kv_rows import RowBudget, smallest_budget
from services.scheduler.world.recovery import Recovery
from shared.messages import RankReady


class ReportedModel:
    """The model as the ranks of the current epoch report it, once they have loaded."""

    def __init__(self, reports: Callable[[], Sequence[RankReady]], recovery: Recovery) -> None:
        """Begin without reports.

        Args:
            reports: returns those of the ranks that have loaded, in rank order.
            recovery: reduces the KV memory after an epoch that ran out of it.
        """
        self._reports = reports
        self._recovery = recovery
        self.context_tokens_max = 0
        """Longest context in tokens, also after the epoch; 0 before the first is ready."""
        self.vocab_size = 0
        """Tokens in the vocabulary, also after the epoch; 0 before the first is ready."""
        self._kv_bytes = 0
        """KV budget of the current epoch, or of the last one until another begins."""

    def note_ready(self) -> None:
        """Take over context and vocabulary, because all ranks have loaded."""
        reports = self._reports()
        self.context_tokens_max = min(report.context_tokens_max for report in reports)
        self.vocab_size = min(report.vocab_size for report in reports)

    def kv_budget(self) -> RowBudget:
        """Return the KV memory that each rank may use, as reported by the rank with the least.

        After an epoch that ran out of device memory, all later ones get less.
        """
        budget = self._recovery.limit_budget(smallest_budget(self._reports()))
        self._kv_bytes = budget.bytes_max
        return budget

    def forget_kv_budget(self) -> None:
        """Begin another epoch, whose budget is not known yet."""
        self._kv_bytes = 0

    def reduce_kv_budget(self) -> None:
        """Give later epochs less KV memory, because a rank has none left; once per epoch."""
        if self._kv_bytes:
            self._recovery.reduce_kv_budget(self._kv_bytes)
            self._kv_bytes = 0

    def prefill_time(self) -> tuple[int, float]:
        """Return tokens and milliseconds of a prompt on the slowest rank; 0 tokens: unknown."""
        reports = self._reports()
        slowest = max(reports, key=lambda report: report.prefill_ms)
        return slowest.prefill_tokens, slowest.prefill_ms

    def fingerprint(self) -> str:
        """Return the model's fingerprint; "" before a rank has loaded."""
        return next((report.model_fingerprint for report in self._reports()), "")
