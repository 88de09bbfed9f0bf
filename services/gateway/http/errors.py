"""Errors of requests. Owns which status and code each cause gets, and OpenAI's JSON body of it.

Other dialects make their own body from the same error.
"""

import math
from typing import assert_never

import orjson
from aiohttp import web

from shared.errors import Refusal
from shared.messages import RequestFailed, RequestFinished, RequestRejected

QUEUE_RETRY_S = 30.0
"""Retry-After of a request that waited too long in the queue; the queue empties slowly."""
RETRY_AFTER_MIN_S = 1
RETRY_AFTER_MAX_S = 120
"""Bounds of Retry-After: clients that retry at once cause overload, and a restart takes less than
two minutes."""


class ApiError(Refusal):
    """An error that ends a request: an HTTP status, a sentence, and its cause for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        close: bool = False,
    ) -> None:
        """Store what the response says.

        Args:
            status: HTTP status from 400.
            message: a sentence with cause and remedy.
            param: path of the request field that caused the error; None if no field did.
            code: identifier of the cause for programs.
            retry_after_s: seconds after which a retry may succeed, sent as Retry-After.
            close: close the connection after the response.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.close = close
        """Close the connection afterwards: the rest of its bytes was not read or is not valid."""

    def body(self) -> bytes:
        """Return OpenAI's JSON body, `{"error": {...}}`."""
        error = {
            "message": self.message,
            "type": _type_of(self.status),
            "param": self.param,
            "code": self.code,
        }
        return orjson.dumps({"error": error})

    def response(self, body: bytes | None = None, status: int = 0) -> web.Response:
        """Return the HTTP response with Retry-After and `WWW-Authenticate`.

        Args:
            body: the dialect's JSON body; None: OpenAI's.
            status: the dialect's HTTP status; 0: that of the error.
        """
        headers = {}
        if self.retry_after_s is not None:
            seconds = max(math.ceil(self.retry_after_s), RETRY_AFTER_MIN_S)
            headers["Retry-After"] = str(min(seconds, RETRY_AFTER_MAX_S))
        if self.status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="lockstep"'
        response = web.Response(
            status=status or self.status,
            body=self.body() if body is None else body,
            content_type="application/json",
            headers=headers,
        )
        if self.close:
            response.force_close()
        return response


class PromptTooLong(ApiError):
    """The 400 for a prompt that leaves no room for a completion in the context."""

    def __init__(self, length: str, context: int, param: str, prompt_tokens: int = 0) -> None:
        """Store the lengths, which some clients read to shorten their conversation.

        Args:
            length: the prompt's length in words, for example "5000 tokens".
            context: most tokens that prompt and completion may have together.
            param: name of the request field that holds the prompt.
            prompt_tokens: the prompt's length, estimated if it was not encoded; 0: only known to be
                too long.
        """
        super().__init__(
            400,
            f"{context_sentence(context)} However, the prompt in {param} has {length}, and a "
            "completion needs room too: shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens or context + 1
        self.prompt_tokens_max = context - 1
        """Longest prompt: one token of the completion must fit behind it."""


def context_sentence(context: int) -> str:
    """Return the sentence by which clients such as litellm know that a context is too short.

    Args:
        context: most tokens that prompt and completion may have together.
    """
    return f"This model's maximum context length is {context} tokens."


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400, the error of a request that is not valid.

    Args:
        message: a sentence with cause and remedy.
        param: path of the request field that caused the error; None if no field did.
        code: identifier of the cause for programs.
    """
    return ApiError(400, message, param=param, code=code)


def invalid_field(param: str, problem: str, code: str | None = None) -> ApiError:
    """Return a 400 for a request field with a wrong value.

    Args:
        param: path of the field, which begins the message.
        problem: the rest of the message after a colon: a sentence with cause and remedy.
        code: identifier of the cause for programs.
    """
    return invalid(f"{param}: {problem}", param, code)


def unsupported(param: str, problem: str) -> ApiError:
    """Return a 400 for a value that OpenAI's API allows, but not this server (`invalid_field`)."""
    return invalid_field(param, problem, "unsupported_value")


def closing(status: int, message: str, code: str | None = None) -> ApiError:
    """Return an error after whose response the connection is closed: its body was not read.

    Args:
        status: HTTP status from 400.
        message: a sentence with cause and remedy.
        code: identifier of the cause for programs.
    """
    return ApiError(status, message, code=code, close=True)


def unavailable(message: str, retry_after_s: float) -> ApiError:
    """Return a 503 for a request that may succeed later."""
    return ApiError(503, message, code="unavailable", retry_after_s=retry_after_s)


def failed(message: str) -> ApiError:
    """Return a 500 for an accepted request that could not be completed."""
    return ApiError(500, message, code="request_failed")


def timed_out(message: str) -> ApiError:
    """Return a 504 for a request that did not end within its deadline."""
    return ApiError(504, message, code="deadline_exceeded")


def ended(failure: RequestFailed) -> ApiError:
    """Return the HTTP error for an accepted request that the scheduler reports as failed.

    The status depends on the reported cause.
    """
    match failure.cause:
        case "deadline":
            return timed_out(failure.detail)
        case "queue_deadline":
            return ApiError(429, failure.detail, code="queue_deadline", retry_after_s=QUEUE_RETRY_S)
        case "stopping":
            return unavailable(failure.detail, 5.0)
        case "grammar":
            return invalid(failure.detail, code="grammar_failed")
        case "grammar_deadline":
            return unavailable(failure.detail, 5.0)
        case "failed":
            return failed(failure.detail)
        case _:
            assert_never(failure.cause)


def cut_off(end: RequestFinished) -> ApiError:
    """Return the HTTP error for a request that ended without `stop` or `length`."""
    if end.finish_reason == "error":
        return timed_out("The request did not end within its deadline.")
    return failed("The request was aborted by the server.")


def rejected(rejection: RequestRejected, prompt_param: str) -> ApiError:
    """Return the HTTP error for a request that the scheduler rejected, with a status by cause.

    Args:
        rejection: the scheduler's message.
        prompt_param: name of the request field that holds the prompt, for errors.
    """
    retry_after_s = rejection.retry_after_s
    if rejection.cause == "queue_full":
        retry_after_s = RETRY_AFTER_MIN_S if retry_after_s is None else retry_after_s
        return ApiError(429, rejection.detail, code="queue_full", retry_after_s=retry_after_s)
    if rejection.cause == "too_long":
        return invalid(rejection.detail, prompt_param, "context_length_exceeded")
    if rejection.cause == "invalid":
        return invalid(rejection.detail)
    if rejection.cause == "no_drafts":
        return invalid(rejection.detail, "speculation.method", "unsupported_value")
    if rejection.cause == "deadline":
        return timed_out(rejection.detail)
    return unavailable(rejection.detail, 5.0 if retry_after_s is None else retry_after_s)


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 403:
        return "permission_error"
    return "invalid_request_error" if status < 500 else "server_error"
