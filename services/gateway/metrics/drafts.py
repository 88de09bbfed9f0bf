"""The metrics of drafts: what the scheduler counts by method, with the method as a label.

Beside them stand vLLM's names for all methods together.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_COUNT = re.compile(r"drafts_(ngram|draft_model|eagle)_(rows|proposed|accepted)_total")
_AT = re.compile(r"drafts_(ngram|draft_model|eagle)_(proposed|accepted)_at_(\d+)_total")
_WORDS = {
    "rows": "Rows whose drafts were verified, once per step.",
    "proposed": "Drafts that were verified.",
    "accepted": "Drafts that came true.",
}
_VLLM = {
    "drafted_rows_total": ("num_drafts", "Rows whose drafts were verified, once per step."),
    "drafts_proposed_total": ("num_draft_tokens", "Drafts that were verified."),
    "drafts_accepted_total": ("num_accepted_tokens", "Drafts that came true."),
}


def is_drafts(name: str) -> bool:
    """Tell whether a counter of the scheduler is shown here."""
    return name in _VLLM or bool(_COUNT.fullmatch(name) or _AT.fullmatch(name))


def families(prefix: str, counters: Mapping[str, float]) -> Iterator[Metric]:
    """Yield a metric for what is counted of drafts; nothing without any.

    Args:
        prefix: what our metrics' names begin with.
        counters: the scheduler's, all of them.
    """
    for name, (plain, text) in _VLLM.items():
        if name in counters:
            yield CounterMetricFamily(f"{prefix}spec_decode_{plain}", text, value=counters[name])
    counts: dict[str, dict[str, float]] = defaultdict(dict)
    places: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for name, value in sorted(counters.items()):
        if found := _COUNT.fullmatch(name):
            counts[found[2]][found[1]] = value
        elif found := _AT.fullmatch(name):
            places[found[2]][found[1], found[3]] = value
    for what, by_method in counts.items():
        family = CounterMetricFamily(f"{prefix}drafts_{what}", _WORDS[what], labels=["method"])
        for method, value in by_method.items():
            family.add_metric([method], value)
        yield family
    for what, by_place in places.items():
        family = CounterMetricFamily(
            f"{prefix}drafts_{what}_at", _WORDS[what], labels=["method", "position"]
        )
        for labels, value in by_place.items():
            family.add_metric(list(labels), value)
        yield family
    rows = {method: count for method, count in counts["rows"].items() if count}
    if rows:
        yield _per_row(f"{prefix}draft_accepted_length", "Drafts accepted", rows, counts, 0.0)
        yield _per_row(f"{prefix}draft_tokens_per_step", "Tokens", rows, counts, 1.0)


def _per_row(
    name: str,
    what: str,
    rows: Mapping[str, float],
    counts: Mapping[str, Mapping[str, float]],
    more: float,
) -> GaugeMetricFamily:
    """Return a mean over rows with drafts since the scheduler's start, by method."""
    family = GaugeMetricFamily(name, f"{what} per row with drafts and step.", labels=["method"])
    for method, count in rows.items():
        family.add_metric([method], counts["accepted"].get(method, 0.0) / count + more)
    return family
