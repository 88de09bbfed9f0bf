"""`lockstep status` tells of drafts in a line per method."""

from services.supervisor.status.status_table import render
from tests.unit.supervisor.status.statuses import status


def test_a_line_per_method() -> None:
    """Proposed, accepted, by position, and tokens per step; not as twenty counters."""
    text = render(
        status(
            counters={
                "steps_total": 9.0,
                "drafts_eagle_rows_total": 10.0,
                "drafts_eagle_proposed_total": 20.0,
                "drafts_eagle_accepted_total": 13.0,
                "drafts_eagle_proposed_at_0_total": 10.0,
                "drafts_eagle_accepted_at_0_total": 8.0,
                "drafts_eagle_proposed_at_1_total": 10.0,
                "drafts_eagle_accepted_at_1_total": 5.0,
            }
        )
    )
    line = "drafts       eagle: 20 proposed, 13 accepted (65%; by position 80 50 %), 2.30 tokens"
    assert line in text
    assert "drafts_eagle" not in text
    assert "steps_total 9" in text


def test_without_drafts_there_is_no_line() -> None:
    """Nothing is said of what never was."""
    assert "\n  drafts " not in render(status(counters={"steps_total": 9.0}))
