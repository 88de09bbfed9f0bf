"""`lockstep status` tells of drafts in a line per method."""

from services.supervisor.status.status_table import render
from shared.messages import DraftStatistics
from tests.unit.supervisor.status.statuses import status


def test_a_line_per_method() -> None:
    """Proposed, accepted, by position, and tokens per step; not as twenty counters."""
    text = render(
        status(
            counters={"steps_total": 9.0},
            drafts=[
                DraftStatistics(method="eagle", rows=10, proposed_at=[10, 10], accepted_at=[8, 5])
            ],
        )
    )
    line = "drafts       eagle: 20 proposed, 13 accepted (65%; by position 80 50 %), 2.30 tokens"
    assert line in text
    assert "drafts_eagle" not in text
    assert "steps_total 9" in text


def test_without_drafts_there_is_no_line() -> None:
    """Nothing is said of what never was."""
    assert "\n  drafts " not in render(status(counters={"steps_total": 9.0}))
