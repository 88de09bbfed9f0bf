"""Endpoints GET /v1/models and /v1/models/{name}, in the form of OpenAI's or Anthropic's API."""

import datetime as dt
from typing import Any

from aiohttp import web

from services.gateway.endpoints import codex_catalog
from services.gateway.endpoints.completion_service import SERVICE, CompletionService
from services.gateway.http.json_response import json_response

VERSION_HEADER = "anthropic-version"
"""Header of Anthropic's clients, which expect their own form."""


def wants_anthropic(request: web.Request) -> bool:
    """Return whether a request is from a client of Anthropic's API for a path of both APIs."""
    return VERSION_HEADER in request.headers and request.path.startswith("/v1/models")


async def models(request: web.Request) -> web.Response:
    """Answer GET /v1/models with the served model and its aliases that are no patterns.

    Codex, which sends its version, gets its catalog of models too.
    """
    service = request.app[SERVICE]
    names = service.model_names.listed
    if wants_anthropic(request):
        page = {
            "data": [_anthropic_model(service, name) for name in names],
            "has_more": False,
            "first_id": names[0],
            "last_id": names[-1],
        }
        return json_response(page)
    models = {"object": "list", "data": [_openai_model(service, name) for name in names]}
    if "client_version" in request.query:
        models["models"] = codex_catalog.entries(service)
    return json_response(models)


async def model(request: web.Request) -> web.Response:
    """Answer GET /v1/models/{name} with the served model under the name that was asked for.

    Raises:
        ApiError: 404 for a name that requests may not use.
    """
    service = request.app[SERVICE]
    name = request.match_info["name"]
    service.check_model(name)
    make = _anthropic_model if wants_anthropic(request) else _openai_model
    return json_response(make(service, name))


def _openai_model(service: CompletionService, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_unix_s,
        "owned_by": "lockstep",
        "max_model_len": service.status.context_tokens_max or None,
        **service.output_formats,
        "speculation": _speculation(service),
    }


def _speculation(service: CompletionService) -> list[dict[str, Any]]:
    """Return the verified and accepted drafts of each method, in all and by position."""
    report = service.status.last
    return [
        {
            "method": one.method,
            "rows": one.rows,
            "proposed": one.proposed,
            "accepted": one.accepted,
            "accepted_per_row": one.accepted / one.rows if one.rows else 0.0,
            "accepted_by_position": one.accepted_at,
        }
        for one in (report.drafts if report is not None else [])
    ]


def _anthropic_model(service: CompletionService, name: str) -> dict[str, Any]:
    started = dt.datetime.fromtimestamp(service.started_unix_s, dt.UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": service.status.context_tokens_max or None,
    }
