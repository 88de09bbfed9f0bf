"""Prometheus metrics of drafts: labels by model, method and position, and means."""

from prometheus_client.core import Metric

from services.gateway.metrics import drafts
from shared.messages import DraftStatistics

STATISTICS = [
    DraftStatistics(
        method="draft_model",
        rows=4,
        proposed_at=[4, 1, 1, 1, 1, 1, 1, 1, 1],
        accepted_at=[3, 1, 0, 0, 0, 0, 0, 0, 0],
    ),
    DraftStatistics(method="ngram", rows=2, proposed_at=[2, 2, 2, 2], accepted_at=[2, 1, 1, 1]),
]


def _samples(metrics: list[Metric]) -> dict[tuple[str, str, str], float]:
    return {
        (one.name, one.labels.get("method", ""), one.labels.get("position", "")): one.value
        for metric in metrics
        for one in metric.samples
    }


def test_draft_metrics_are_labelled_by_model_method_and_position() -> None:
    """Sums by method and by position, and vLLM's names for the totals."""
    metrics = list(drafts.families("x_", "m", STATISTICS))
    labelled = [one for metric in metrics for one in metric.samples if "method" in one.labels]
    assert {one.labels["model"] for one in labelled} == {"m"}
    found = _samples(metrics)
    assert found["x_draft_tokens_proposed_total", "ngram", ""] == 8
    assert found["x_draft_tokens_accepted_total", "draft_model", ""] == 4
    assert found["x_draft_tokens_proposed_by_position_total", "draft_model", "8"] == 1
    assert found["x_draft_tokens_accepted_by_position_total", "draft_model", "0"] == 3
    assert found["x_spec_decode_num_drafts_total", "", ""] == 6
    assert found["x_spec_decode_num_draft_tokens_total", "", ""] == 20
    assert found["x_spec_decode_num_accepted_tokens_total", "", ""] == 9
    assert found["x_draft_tokens_accepted_per_row", "ngram", ""] == 2.5
    assert found["x_tokens_per_draft_row", "draft_model", ""] == 2.0


def test_draft_metric_totals_are_zero_before_first_draft() -> None:
    """vLLM's totals exist from the start; labelled metrics appear with the first draft."""
    found = _samples(list(drafts.families("x_", "m", [])))
    assert set(found.values()) == {0}
    assert len(found) == 3
