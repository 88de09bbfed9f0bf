"""Errors in the form of Anthropic's API."""

import json

import pytest

from services.gateway.dialects.messages import errors
from services.gateway.http.errors import ApiError, PromptTooLong, unavailable


@pytest.mark.parametrize(
    ("status", "answered", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (401, 401, "authentication_error"),
        (403, 403, "permission_error"),
        (404, 404, "not_found_error"),
        (405, 405, "invalid_request_error"),
        (413, 413, "request_too_large"),
        (415, 415, "invalid_request_error"),
        (429, 429, "rate_limit_error"),
        (500, 500, "api_error"),
        (503, 529, "overloaded_error"),
        (504, 504, "timeout_error"),
    ],
)
def test_error_has_status_type_and_request_id(status: int, answered: int, kind: str) -> None:
    """Clients decide by status and type whether they repeat the request."""
    response = errors.response(ApiError(status, "Because.", param="x", code="y"))
    body = json.loads(response.body or b"")  # type: ignore[arg-type]
    assert response.status == answered
    assert body == {
        "type": "error",
        "error": {"type": kind, "message": "Because."},
        "request_id": response.headers["request-id"],
    }


def test_overloaded_server_says_when_to_try_again() -> None:
    """Retry-after is kept."""
    response = errors.response(unavailable("Starting.", 7.0))
    assert (response.status, response.headers["Retry-After"]) == (529, "7")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PromptTooLong("600 tokens", 512, "messages", 600), "600 tokens > 511 maximum"),
        (PromptTooLong("512 tokens", 512, "messages", 512), "512 tokens > 511 maximum"),
        (PromptTooLong("many characters", 512, "messages"), "513 tokens > 511 maximum"),
    ],
)
def test_prompt_that_is_too_long_has_the_sentence_that_clients_read(
    error: ApiError, text: str
) -> None:
    """Claude Code finds both numbers in it, and the first is always the larger one."""
    body = json.loads(errors.body(error, "id"))
    assert body["error"] == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {text}",
    }
