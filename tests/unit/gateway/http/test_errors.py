"""Error responses: rejections of the scheduler, and OpenAI's format."""

import json
from typing import Any

import pytest

from services.gateway.http.errors import ApiError, rejected
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
def test_scheduler_rejection_becomes_http_error_with_status_field_and_code(
    cause: Any, status: int, param: str | None, code: str | None
) -> None:
    """The scheduler's message is unchanged; each cause has its status, field and code."""
    rejection = RequestRejected(request_id="r", cause=cause, detail="Why.")

    error = rejected(rejection, "messages")

    assert (error.status, error.param, error.message) == (status, param, "Why.")
    assert code is None or error.code == code


def test_error_body_has_openai_format_for_every_status() -> None:
    """The body has message, type, param and code for every status."""
    for status, kind in (
        (400, "invalid_request_error"),
        (403, "permission_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
    ):
        body = json.loads(ApiError(status, "No.", param="n", code="c").body())
        assert body == {"error": {"message": "No.", "type": kind, "param": "n", "code": "c"}}
