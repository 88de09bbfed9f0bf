"""Prometheus metrics of drafts by model, method and position; vLLM's names for their sums."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.messages import DraftStatistics

_LABELS = ["model", "method"]
_ROWS = "Rows whose drafts were verified; one row is one sequence in one step."
_PROPOSED = "Drafted tokens that were verified."
_ACCEPTED = "Drafted tokens that were accepted."


def families(prefix: str, model: str, statistics: Sequence[DraftStatistics]) -> Iterator[Metric]:
    """Yield Prometheus metrics of draft tokens: totals, and counts by model, method and position.

    The totals have vLLM's names and are always present.

    Args:
        prefix: first part of every metric's name.
        model: name of the model for which drafts are made.
        statistics: the scheduler's counts since its start, one entry per method that had drafts.
    """
    for name, text, total in (
        ("num_drafts", _ROWS, sum(one.rows for one in statistics)),
        ("num_draft_tokens", _PROPOSED, sum(one.proposed for one in statistics)),
        ("num_accepted_tokens", _ACCEPTED, sum(one.accepted for one in statistics)),
    ):
        yield CounterMetricFamily(f"{prefix}spec_decode_{name}", text, value=total)
    if statistics:
        yield from _labelled(prefix, model, statistics)


def _labelled(prefix: str, model: str, statistics: Sequence[DraftStatistics]) -> Iterator[Metric]:
    def counter(name: str, text: str, *more: str) -> CounterMetricFamily:
        return CounterMetricFamily(prefix + name, text, labels=[*_LABELS, *more])

    def gauge(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(prefix + name, text, labels=_LABELS)

    rows = counter("draft_rows", _ROWS)
    proposed = counter("draft_tokens_proposed", _PROPOSED)
    accepted = counter("draft_tokens_accepted", _ACCEPTED)
    accepted_mean = gauge(
        "draft_tokens_accepted_per_row",
        "Drafted tokens accepted per row with drafts, the mean since the scheduler started.",
    )
    tokens_mean = gauge(
        "tokens_per_draft_row",
        "Tokens generated per row with drafts, the mean since the scheduler started.",
    )
    proposed_at = counter("draft_tokens_proposed_by_position", _PROPOSED, "position")
    accepted_at = counter("draft_tokens_accepted_by_position", _ACCEPTED, "position")
    for one in statistics:
        rows.add_metric([model, one.method], one.rows)
        proposed.add_metric([model, one.method], one.proposed)
        accepted.add_metric([model, one.method], one.accepted)
        if one.rows:
            accepted_mean.add_metric([model, one.method], one.accepted / one.rows)
            tokens_mean.add_metric([model, one.method], one.accepted / one.rows + 1)
        for position, count in enumerate(one.proposed_at):
            proposed_at.add_metric([model, one.method, str(position)], count)
        for position, count in enumerate(one.accepted_at):
            accepted_at.add_metric([model, one.method, str(position)], count)
    yield from (rows, proposed, accepted, accepted_mean, tokens_mean, proposed_at, accepted_at)
