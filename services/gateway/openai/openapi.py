"""OpenAPI 3.1 document of this API, generated from the request and response types.

Owns the limits that are checked beyond the types (in `validation` and `completions`).
"""

import importlib.metadata
from collections.abc import Iterable
from typing import Any

import msgspec

from services.gateway.http.authentication import PROBES
from services.gateway.openai import response_types
from services.gateway.openai.request_types import (
    PROMPTS_MAX,
    ChatCompletionRequest,
    CompletionRequest,
    RequestedFormat,
)
from services.gateway.openai.validation import allowed_speculation_methods
from shared.configuration.settings import Config

Json = dict[str, Any]

_REQUESTS = (ChatCompletionRequest, CompletionRequest)
_RESPONSES = (
    response_types.Error,
    response_types.ChatCompletion,
    response_types.ChatCompletionChunk,
    response_types.TextCompletion,
    response_types.TextCompletionChunk,
    response_types.ModelInfo,
    response_types.ModelList,
    response_types.Health,
    response_types.Readiness,
    response_types.GatewayStatus,
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
    "504": "The request did not end within its deadline.",
}
_GET_ERRORS = ("401", "403")


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
        [*_REQUESTS, *_RESPONSES], ref_template="#/components/schemas/{name}"
    )
    _narrow(schemas, config, vocab_size)
    paths = _paths()
    for path in open_paths if needs_key else paths:
        for operation in (
            paths[path][method] for method in ("get", "post") if method in paths[path]
        ):
            operation["security"] = []
            del operation["responses"]["401"]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Lockstep",
            "version": _version(),
            "description": "The supported part of OpenAI's API. Other fields are refused by name.",
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


def _paths() -> Json:
    return {
        "/v1/chat/completions": _post(
            "Answer a conversation", ChatCompletionRequest, response_types.ChatCompletion,
            response_types.ChatCompletionChunk,
        ),
        "/v1/completions": _post(
            "Continue texts", CompletionRequest, response_types.TextCompletion,
            response_types.TextCompletionChunk,
        ),
        "/v1/models": _get("The list of served models", response_types.ModelList),
        "/v1/models/{name}": {
            "parameters": [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            ],
            **_get("One model", response_types.ModelInfo, errors=("400", *_GET_ERRORS, "404")),
        },
        "/v1/lockstep/status": _get("The scheduler's last report", response_types.GatewayStatus),
        **{path: _get("Liveness of this process", response_types.Health)
           for path in sorted(PROBES - {"/readyz"})},
        "/readyz": _readiness(),
        "/metrics": _get("Counts and times for Prometheus", "text/plain"),
        "/openapi.json": _get("This document", "application/json"),
    }  # fmt: skip


def _post(summary: str, body: type, response: type, chunk: type) -> Json:
    content = {
        "application/json": {"schema": _ref(response)},
        "text/event-stream": {},
    }
    return {
        "post": {
            "summary": summary,
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _ref(body)}},
            },
            "responses": {
                "200": {
                    "description": "The completions. With `stream` server-sent events: each is a "
                    f"{chunk.__name__} of #/components/schemas, the last is [DONE] or an Error.",
                    "content": content,
                },
                **_errors(_ERRORS),
            },
        }
    }


def _get(summary: str, response: type | str, errors: tuple[str, ...] = _GET_ERRORS) -> Json:
    """Return a path with one GET operation; `response` is a response type or a content type."""
    kind, schema = (
        (response, {}) if isinstance(response, str) else ("application/json", _ref(response))
    )
    return {
        "get": {
            "summary": summary,
            "responses": {
                "200": {"description": summary, "content": {kind: {"schema": schema}}},
                **_errors(errors),
            },
        }
    }


def _readiness() -> Json:
    path = _get("Whether new requests are served", response_types.Readiness)
    responses = path["get"]["responses"]
    responses["503"] = {
        **responses["200"],
        "description": "New requests are not served; `reason` says why.",
    }
    return path


def _errors(statuses: Iterable[str]) -> Json:
    content = {"application/json": {"schema": _ref(response_types.Error)}}
    return {one: {"description": _ERRORS[one], "content": content} for one in statuses}


def _narrow(schemas: Json, config: Config, vocab_size: int) -> None:
    """Add the limits that are checked beyond the types."""
    for request in _REQUESTS:
        fields = schemas[request.__name__]["properties"]
        fields["model"] = {"type": "string", "const": config.served_name}
        fields["store"] = {"enum": [False, None]}
        fields["n"]["anyOf"][0]["maximum"] = config.gateway.choices_max
        fields["stop"]["anyOf"][1]["maxItems"] = config.gateway.stop_strings_max
        tokens = {"pattern": "^[0-9]+$", "description": f"A token id below {vocab_size}."}
        fields["logit_bias"]["anyOf"][0]["propertyNames"] = tokens
    chat = schemas[ChatCompletionRequest.__name__]["properties"]
    chat["tool_choice"] = {"enum": ["auto", "none", None]}
    chat["parallel_tool_calls"] = {"enum": [True, None]}
    schemas[RequestedFormat.__name__]["properties"]["type"] = {"const": "text"}
    method = schemas["SpeculationOptions"]["properties"]["method"]
    method["anyOf"] = [{"enum": [*allowed_speculation_methods(config.speculation), None]}]
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    ids = {"type": "array", "items": token, "minItems": 1}
    text = {"type": "string", "minLength": 1}
    several = {"type": "array", "minItems": 1, "maxItems": PROMPTS_MAX}
    schemas[CompletionRequest.__name__]["properties"]["prompt"] = {
        "anyOf": [text, {**several, "items": text}, ids, {**several, "items": ids}]
    }


def _ref(kind: type) -> Json:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _version() -> str:
    try:
        return importlib.metadata.version("lockstep")
    except importlib.metadata.PackageNotFoundError:
        return "0"
