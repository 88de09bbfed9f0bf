"""What Prometheus reads of drafts: methods and positions are labels, means are there."""

from prometheus_client.core import Metric

from services.gateway.metrics import drafts

COUNTERS = {
    "drafted_rows_total": 6.0,
    "drafts_proposed_total": 20.0,
    "drafts_accepted_total": 9.0,
    "drafts_ngram_rows_total": 2.0,
    "drafts_ngram_proposed_total": 8.0,
    "drafts_ngram_accepted_total": 5.0,
    "drafts_draft_model_rows_total": 4.0,
    "drafts_draft_model_proposed_total": 12.0,
    "drafts_draft_model_accepted_total": 4.0,
    "drafts_draft_model_proposed_at_0_total": 4.0,
    "drafts_draft_model_accepted_at_0_total": 3.0,
    "drafts_draft_model_proposed_at_10_total": 1.0,
    "steps_total": 100.0,
}


def _samples(metrics: list[Metric]) -> dict[tuple[str, str, str], float]:
    return {
        (one.name, one.labels.get("method", ""), one.labels.get("position", "")): one.value
        for metric in metrics
        for one in metric.samples
    }


def test_methods_and_positions_are_labels() -> None:
    """Sums by method, by position, and vLLM's names for all of them."""
    found = _samples(list(drafts.families("x_", COUNTERS)))
    assert found["x_drafts_proposed_total", "ngram", ""] == 8
    assert found["x_drafts_accepted_total", "draft_model", ""] == 4
    assert found["x_drafts_proposed_at_total", "draft_model", "10"] == 1
    assert found["x_drafts_accepted_at_total", "draft_model", "0"] == 3
    assert found["x_spec_decode_num_draft_tokens_total", "", ""] == 20
    assert found["x_draft_accepted_length", "ngram", ""] == 2.5
    assert found["x_draft_tokens_per_step", "draft_model", ""] == 2.0


def test_nothing_is_shown_twice_or_lost() -> None:
    """Every counter of drafts is one of these, and nothing else is."""
    taken = [name for name in COUNTERS if drafts.is_drafts(name)]
    assert set(COUNTERS) - set(taken) == {"steps_total"}
    assert list(drafts.families("x_", {"steps_total": 1.0})) == []
