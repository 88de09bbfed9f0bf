"""OpenAPI 3.1 document of all dialects, generated from the request and response types.

Owns the limits that are checked beyond the types (in `validation` and `completions`).
"""

import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from services.gateway.dialects.messages import request_types as messages_requests
from services.gateway.dialects.messages import response_types as messages_responses
from services.gateway.dialects.openai import model_types, request_types, response_types, tokens
from services.gateway.dialects.openai.request_types import (
    PROMPTS_MAX,
    ChatCompletionRequest,
    CompletionRequest,
)
from services.gateway.dialects.openai.validation import (
    ARGUMENT_NAME,
    allowed_speculation_methods,
)
from services.gateway.dialects.responses import request_types as responses_requests
from services.gateway.dialects.responses import response_types as responses_responses
from services.gateway.endpoints.model_names import ModelNames
from services.gateway.endpoints.trace import SECONDS_DEFAULT
from services.gateway.http.authentication import PROBES
from shared.configuration.settings import Config
from shared.measurements.trace import SECONDS_MAX

Json = dict[str, Any]

_METHODS = frozenset({"get", "post", "delete"})
"""Keys of a path in the document that are operations."""

_GENERATION_REQUESTS = (
    ChatCompletionRequest,
    CompletionRequest,
    responses_requests.ResponsesRequest,
)
REQUESTS = (
    *_GENERATION_REQUESTS,
    messages_requests.MessagesRequest,
    messages_requests.CountTokensRequest,
    tokens.TokenizeRequest,
    tokens.DetokenizeRequest,
)
"""Request types of all endpoints."""
REQUEST_MODULES = (request_types, messages_requests, responses_requests, tokens)
"""Modules with the request types and their parts."""
_RESPONSES = (
    response_types.Error,
    response_types.ChatCompletion,
    response_types.ChatCompletionChunk,
    response_types.TextCompletion,
    response_types.TextCompletionChunk,
    model_types.ModelInfo,
    model_types.ModelList,
    response_types.Health,
    response_types.Readiness,
    response_types.GatewayStatus,
    tokens.TokenIds,
    tokens.TokenText,
    messages_responses.MessagesResponse,
    messages_responses.TokenCount,
    messages_responses.MessagesError,
    responses_responses.ModelResponse,
    responses_responses.InputTokenCount,
    responses_responses.DeletedResponse,
    responses_responses.InputItemPage,
)
_ERRORS = {
    "400": "The request is not valid; `param` names the field.",
    "401": "A valid API key is required.",
    "403": "The Host or Origin header is not allowed.",
    "404": "The model does not exist.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not plain JSON.",
    "429": "The server is busy; Retry-After says when to try again.",
    "500": "The request could not be completed.",
    "503": "New requests are not served now; Retry-After says when to try again.",
    "529": "New requests are not served now; Retry-After says when to try again.",
    "504": "The request did not end within its deadline.",
}
_GET_ERRORS = {status: _ERRORS[status] for status in ("401", "403")}
_MODEL_ERRORS = {status: _ERRORS[status] for status in ("400", "401", "403", "404")}
_STORED_ERRORS = {
    **{status: _ERRORS[status] for status in ("400", "401", "403", "404", "429", "503")},
    "404": "No response with this id is stored for the API key.",
}
_TRACE_ERRORS = {status: _ERRORS[status] for status in ("400", "401", "403", "429", "503")}
_POST_ERRORS = {status: text for status, text in _ERRORS.items() if status != "529"}
_RESPONSES_ERRORS = {**_POST_ERRORS, "404": "The model or an earlier response does not exist."}
_MESSAGES_ERRORS = {status: text for status, text in _ERRORS.items() if status != "503"}


def document(
    config: Config, vocab_size: int, *, needs_key: bool, open_paths: Iterable[str]
) -> Json:
    """Return the OpenAPI document of this server as nested dicts.

    Args:
        config: the settings, with the limits of this server.
        vocab_size: number of the model's token ids.
        needs_key: requests need an API key.
        open_paths: paths that need no API key.
    """
    _, schemas = msgspec.json.schema_components(
        [*REQUESTS, *_RESPONSES], ref_template="#/components/schemas/{name}"
    )
    _narrow(schemas, config, vocab_size)
    paths = _paths()
    for path in open_paths if needs_key else paths:
        for operation in (paths[path][method] for method in _METHODS & paths[path].keys()):
            operation["security"] = []
            del operation["responses"]["401"]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Lockstep",
            "version": _version(),
            "description": "OpenAI's and Anthropic's APIs. Fields without effect are ignored and "
            "reported.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"header": []}] if needs_key else [],
    }


def request_type(name: str) -> type | None:
    """Return the type of a request or of a part of one by its name; None for other names."""
    found = (getattr(module, name, None) for module in REQUEST_MODULES)
    return next((one for one in found if one is not None and one not in _RESPONSES), None)


def _paths() -> Json:
    return {
        "/v1/chat/completions": _completion(
            "Answer a conversation", ChatCompletionRequest, response_types.ChatCompletion,
            response_types.ChatCompletionChunk,
        ),
        "/v1/completions": _completion(
            "Continue texts", CompletionRequest, response_types.TextCompletion,
            response_types.TextCompletionChunk,
        ),
        "/v1/messages": _post(
            "Answer a conversation, as in Anthropic's API", messages_requests.MessagesRequest,
            messages_responses.MessagesResponse,
            "The message. With `stream` server-sent events of Anthropic's API.",
            errors=_MESSAGES_ERRORS, error=messages_responses.MessagesError, is_streamed=True,
        ),
        "/v1/messages/count_tokens": _post(
            "Length of a conversation's prompt", messages_requests.CountTokensRequest,
            messages_responses.TokenCount, "The length.", errors=_MESSAGES_ERRORS,
            error=messages_responses.MessagesError,
        ),
        **_responses_paths(),
        "/tokenize": _post(
            "Token ids of a text or conversation", tokens.TokenizeRequest, tokens.TokenIds,
            "The token ids.",
        ),
        "/detokenize": _post(
            "Text of token ids", tokens.DetokenizeRequest, tokens.TokenText, "The text.",
        ),
        "/v1/models": _get("The list of served models", model_types.ModelList),
        "/v1/models/{name}": {
            "parameters": [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            ],
            **_get("One model", model_types.ModelInfo, _MODEL_ERRORS),
        },
        "/v1/lockstep/status": _get("The scheduler's last report", response_types.GatewayStatus),
        "/v1/lockstep/trace": _trace(),
        **{path: _get("Liveness of this process", response_types.Health)
           for path in sorted(PROBES - {"/readyz"})},
        "/readyz": _readiness(),
        "/metrics": _get("Counts and times for Prometheus", "text/plain"),
        "/openapi.json": _get("This document", "application/json"),
    }  # fmt: skip


def _responses_paths() -> Json:
    path = "/v1/responses/{response_id}"
    name = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
    stored = _get("A stored response", responses_responses.ModelResponse, _STORED_ERRORS)
    deletion = _operation(
        "Delete a stored response", responses_responses.DeletedResponse, _STORED_ERRORS
    )
    items = _get(
        "Input items of a stored response", responses_responses.InputItemPage, _STORED_ERRORS
    )
    return {
        "/v1/responses": _post(
            "Answer a conversation, as in OpenAI's Responses API",
            responses_requests.ResponsesRequest,
            responses_responses.ModelResponse,
            "The response. With `stream` server-sent events of OpenAI's Responses API.",
            errors=_RESPONSES_ERRORS,
            is_streamed=True,
        ),
        "/v1/responses/input_tokens": _post(
            "Length of a conversation's prompt",
            responses_requests.ResponsesRequest,
            responses_responses.InputTokenCount,
            "The length.",
            errors=_RESPONSES_ERRORS,
        ),
        path: {"parameters": [name], **stored, "delete": deletion},
        f"{path}/input_items": {"parameters": [name], **items},
    }


def _completion(summary: str, body: type, response: type, chunk: type) -> Json:
    return _post(
        summary,
        body,
        response,
        "The completions. With `stream` server-sent events: each is a "
        f"{chunk.__name__} of #/components/schemas, the last is [DONE] or an Error.",
        is_streamed=True,
    )


def _post(
    summary: str,
    body: type,
    response: type,
    description: str,
    *,
    errors: Mapping[str, str] = _POST_ERRORS,
    error: type = response_types.Error,
    is_streamed: bool = False,
) -> Json:
    """Return a path with one POST operation.

    Args:
        summary: its purpose.
        body: type of the request.
        response: type of the response that is not streamed.
        description: what the response is.
        errors: statuses of errors with their causes.
        error: type of their body.
        is_streamed: the response may be a stream.
    """
    content: Json = {"application/json": {"schema": _ref(response)}}
    if is_streamed:
        content["text/event-stream"] = {}
    return {
        "post": {
            "summary": summary,
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _ref(body)}},
            },
            "responses": {
                "200": {"description": description, "content": content},
                **_errors(errors, error),
            },
        }
    }


def _get(summary: str, response: type | str, errors: Mapping[str, str] = _GET_ERRORS) -> Json:
    """Return a path with one GET operation, whose arguments are those of `_operation`."""
    return {"get": _operation(summary, response, errors)}


def _operation(summary: str, response: type | str, errors: Mapping[str, str]) -> Json:
    """Return an operation without a body; `response` is a response type or a content type."""
    kind, schema = (
        (response, {}) if isinstance(response, str) else ("application/json", _ref(response))
    )
    return {
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": {kind: {"schema": schema}}},
            **_errors(errors),
        },
    }


def _readiness() -> Json:
    path = _get("Whether new requests are served", response_types.Readiness)
    responses = path["get"]["responses"]
    responses["503"] = {
        **responses["200"],
        "description": "New requests are not served; `reason` says why.",
    }
    return path


def _trace() -> Json:
    seconds = {"type": "number", "minimum": 1, "maximum": SECONDS_MAX, "default": SECONDS_DEFAULT}
    path = _get(
        "A trace of the next seconds, for ui.perfetto.dev", "application/json", _TRACE_ERRORS
    )
    path["get"]["parameters"] = [
        {"name": "seconds", "in": "query", "required": False, "schema": seconds}
    ]
    return path


def _errors(errors: Mapping[str, str], error: type = response_types.Error) -> Json:
    content = {"application/json": {"schema": _ref(error)}}
    return {one: {"description": text, "content": content} for one, text in errors.items()}


def _narrow(schemas: Json, config: Config, vocab_size: int) -> None:
    """Add the limits that are checked beyond the types; allow fields that are ignored."""
    for name, schema in schemas.items():
        if request_type(name) is not None:
            schema.pop("additionalProperties", None)
    for one in REQUESTS:
        model = schemas[one.__name__]["properties"]["model"]
        schemas[one.__name__]["properties"]["model"] = _model_name(config, is_null="anyOf" in model)
    sequences = schemas[messages_requests.MessagesRequest.__name__]["properties"]["stop_sequences"]
    sequences["anyOf"][0]["maxItems"] = config.gateway.stop_strings_max
    _narrow_blocks(schemas)
    _require_one(schemas, responses_requests.ResponsesRequest, "input", "instructions",
                 "previous_response_id")  # fmt: skip
    _require_one(schemas, tokens.TokenizeRequest, "prompt", "messages")
    for one in REQUESTS:
        arguments = schemas[one.__name__]["properties"].get("chat_template_kwargs")
        if arguments is not None:
            arguments["anyOf"][0]["propertyNames"] = {"pattern": ARGUMENT_NAME}
    _narrow_generation(schemas, config, vocab_size)


def _narrow_blocks(schemas: Json) -> None:
    """Add that every block of Anthropic's API has a type."""
    block = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
    messages = schemas[messages_requests.InputMessage.__name__]["properties"]["content"]
    requests = (messages_requests.MessagesRequest, messages_requests.CountTokensRequest)
    systems = [schemas[one.__name__]["properties"]["system"] for one in requests]
    for content in (messages, *systems):
        for choice in content["anyOf"]:
            if choice.get("type") == "array":
                choice["items"] = block


def _require_one(schemas: Json, request: type, *names: str) -> None:
    """Add that a request has one of some fields at least."""
    schemas[request.__name__]["anyOf"] = [{"required": [name]} for name in names]


def _narrow_generation(schemas: Json, config: Config, vocab_size: int) -> None:
    """Add the limits of OpenAI's endpoints."""
    for request in _GENERATION_REQUESTS:
        fields = schemas[request.__name__]["properties"]
        fields["n"]["anyOf"][0]["maximum"] = config.gateway.choices_max
        fields["stop"]["anyOf"][1]["maxItems"] = config.gateway.stop_strings_max
        names = {"pattern": "^[0-9]+$", "description": f"A token id below {vocab_size}."}
        fields["logit_bias"]["anyOf"][0]["propertyNames"] = names
    chat = schemas[ChatCompletionRequest.__name__]["properties"]
    chat["tool_choice"]["anyOf"] = [
        {"enum": ["auto", "none", "required", None]},
        _ref(request_types.NamedToolChoice),
    ]
    method = schemas["SpeculationOptions"]["properties"]["method"]
    method["anyOf"] = [{"enum": [*allowed_speculation_methods(config.speculation), None]}]
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    ids = {"type": "array", "items": token, "minItems": 1}
    text = {"type": "string", "minLength": 1}
    several = {"type": "array", "minItems": 1, "maxItems": PROMPTS_MAX}
    schemas[CompletionRequest.__name__]["properties"]["prompt"] = {
        "anyOf": [text, {**several, "items": text}, ids, {**several, "items": ids}]
    }


def _model_name(config: Config, *, is_null: bool) -> Json:
    """Return the schema of the field with the model's name; it may be null if `is_null`."""
    names = ModelNames(config)
    if names.are_fixed:
        return {"enum": [*names.listed, None]} if is_null else {"enum": names.listed}
    return {"type": ["string", "null"] if is_null else "string", "examples": names.listed}


def _ref(kind: type) -> Json:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _version() -> str:
    try:
        return importlib.metadata.version("lockstep")
    except importlib.metadata.PackageNotFoundError:
        return "0"
