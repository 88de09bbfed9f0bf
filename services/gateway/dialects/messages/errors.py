"""Errors in the form of Anthropic's Messages API. Owns their types, statuses and texts."""

import secrets

import orjson
from aiohttp import web

from services.gateway.http.errors import ApiError, PromptTooLong

REQUEST_ID = "request-id"
"""Header that names a response, for reports of errors."""
OVERLOADED_STATUS = 529
"""Anthropic's status for a server that cannot answer now; clients repeat the request."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def body(error: ApiError, request_id: str) -> bytes:
    """Return the JSON body of an error, which is also the data of a stream's event `error`.

    Args:
        error: the error.
        request_id: id of the response.
    """
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    detail = {"type": kind, "message": _message(error)}
    return orjson.dumps({"type": "error", "error": detail, "request_id": request_id})


def response(error: ApiError) -> web.Response:
    """Return the HTTP response for an error."""
    request_id = f"req_{secrets.token_hex(12)}"
    status = OVERLOADED_STATUS if error.status == 503 else error.status
    answer = error.response(body(error, request_id), status)
    answer.headers[REQUEST_ID] = request_id
    return answer


def _message(error: ApiError) -> str:
    if isinstance(error, PromptTooLong):
        # Clients read both numbers from exactly this sentence, and shorten the conversation.
        numbers = error.prompt_tokens, error.prompt_tokens_max
        return "prompt is too long: {} tokens > {} maximum".format(*numbers)
    return error.message
