"""Prometheus metrics of drafts, by method and position; vLLM's names for all methods together."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.messages import DraftStatistics

_ROWS = "Rows whose drafts were verified; one row is one sequence in one step."
_PROPOSED = "Drafted tokens that were verified."
_ACCEPTED = "Drafted tokens that were accepted."


def families(prefix: str, statistics: Sequence[DraftStatistics]) -> Iterator[Metric]:
    """Yield Prometheus metrics of draft tokens: totals, and counts by method and position.

    The totals have vLLM's names and are always present.

    Args:
        prefix: first part of every metric's name.
        statistics: the scheduler's counts since its start, one entry per method that had drafts.
    """
    for name, text, total in (
        ("num_drafts", _ROWS, sum(one.rows for one in statistics)),
        ("num_draft_tokens", _PROPOSED, sum(one.proposed for one in statistics)),
        ("num_accepted_tokens", _ACCEPTED, sum(one.accepted for one in statistics)),
    ):
        yield CounterMetricFamily(f"{prefix}spec_decode_{name}", text, value=total)
    if statistics:
        yield from _by_method(prefix, statistics)
        yield from _by_position(prefix, statistics)


def _by_method(prefix: str, statistics: Sequence[DraftStatistics]) -> Iterator[Metric]:
    labels = ["method"]
    rows = CounterMetricFamily(f"{prefix}draft_rows", _ROWS, labels=labels)
    proposed = CounterMetricFamily(f"{prefix}draft_tokens_proposed", _PROPOSED, labels=labels)
    accepted = CounterMetricFamily(f"{prefix}draft_tokens_accepted", _ACCEPTED, labels=labels)
    accepted_mean = GaugeMetricFamily(
        f"{prefix}draft_tokens_accepted_per_row",
        "Drafted tokens accepted per row with drafts, the mean since the scheduler started.",
        labels=labels,
    )
    tokens_mean = GaugeMetricFamily(
        f"{prefix}tokens_per_draft_row",
        "Tokens generated per row with drafts, the mean since the scheduler started.",
        labels=labels,
    )
    for one in statistics:
        rows.add_metric([one.method], one.rows)
        proposed.add_metric([one.method], one.proposed)
        accepted.add_metric([one.method], one.accepted)
        if one.rows:
            accepted_mean.add_metric([one.method], one.accepted / one.rows)
            tokens_mean.add_metric([one.method], one.accepted / one.rows + 1)
    yield from (rows, proposed, accepted, accepted_mean, tokens_mean)


def _by_position(prefix: str, statistics: Sequence[DraftStatistics]) -> Iterator[Metric]:
    labels = ["method", "position"]
    proposed = CounterMetricFamily(
        f"{prefix}draft_tokens_proposed_by_position", _PROPOSED, labels=labels
    )
    accepted = CounterMetricFamily(
        f"{prefix}draft_tokens_accepted_by_position", _ACCEPTED, labels=labels
    )
    for one in statistics:
        for position, (tried, taken) in enumerate(
            zip(one.proposed_at, one.accepted_at, strict=True)
        ):
            proposed.add_metric([one.method, str(position)], tried)
            accepted.add_metric([one.method, str(position)], taken)
    yield from (proposed, accepted)
