"""What a refusal by the scheduler is for a client."""

from typing import Any

import pytest

from services.gateway.http.errors import rejected
from shared.messages import RequestRejected


@pytest.mark.parametrize(
    ("cause", "status", "param", "code"),
    [
        ("queue_full", 429, None, "queue_full"),
        ("too_long", 400, "messages", "context_length_exceeded"),
        ("no_drafts", 400, "speculation.method", "unsupported_value"),
        ("invalid", 400, None, None),
        ("draining", 503, None, None),
        ("not_ready", 503, None, None),
    ],
)
def test_a_rejection_has_its_status_and_names_its_field(
    cause: Any, status: int, param: str | None, code: str | None
) -> None:
    """The scheduler's sentence goes out as it is; clients branch on status, field and code."""
    rejection = RequestRejected(request_id="r", cause=cause, detail="Why.")

    error = rejected(rejection, "messages")

    assert (error.status, error.param, error.message) == (status, param, "Why.")
    assert code is None or error.code == code
