"""Sessions that clients name in headers and fields."""

import pytest
from aiohttp.test_utils import make_mocked_request

from services.gateway.endpoints.request_options import SESSION_KEY_CHARS_MAX, session_key


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({"X-Claude-Code-Session-Id": "a", "session-id": "b"}, ("c",), "a"),
        ({"session-id": "b"}, ("c", "d"), "b"),
        ({"x-session-affinity": "e"}, (), "e"),
        ({}, (None, "d"), "d"),
        ({}, (3, {"a": 1}, ""), ""),
        ({}, ("x" * 1_000,), "x" * SESSION_KEY_CHARS_MAX),
    ],
)
def test_session_is_what_the_first_header_or_field_says(
    headers: dict[str, str], fields: tuple[object, ...], expected: str
) -> None:
    """Headers of agents come before fields; values that are no text say nothing."""
    request = make_mocked_request("POST", "/v1/messages", headers=headers)
    assert session_key(request, *fields) == expected
