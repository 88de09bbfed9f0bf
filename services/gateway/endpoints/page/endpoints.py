"""Endpoints of the page: its files, its feed, and the cancellation of a request."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import hdrs, web

from services.gateway.completion.generation import Choice
from services.gateway.endpoints.completion_service import SERVICE, CompletionService
from services.gateway.endpoints.page.assets import Asset
from services.gateway.endpoints.page.feed import Feed, event
from services.gateway.http import authentication
from services.gateway.http.errors import ApiError
from services.gateway.http.json_response import json_response
from shared.configuration.settings import GatewayConfig
from shared.errors import ConfigError

FEED_PATH = "/v1/lockstep/activity"
VIEWERS_MAX = 64
"""Pages that may be open at once; each costs a connection and its snapshots' bytes."""
READ_S_MAX = 30.0
"""Time within which a viewer must read a snapshot, or it is disconnected."""

_FEED = web.AppKey("feed", Feed)
_HEADERS = {
    hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
    hdrs.CACHE_CONTROL: "no-store",
    "X-Accel-Buffering": "no",
}


def add_routes(
    app: web.Application, config: GatewayConfig, assets: Mapping[str, Asset], feed: Feed
) -> None:
    """Add the page's routes to an application; the last routes of all.

    Args:
        app: the application.
        config: the port of the page.
        assets: the page's files by path; {}: no page is served.
        feed: events for open pages.

    Raises:
        ConfigError: when the page's path belongs to another route.
    """
    taken = {one.canonical for one in app.router.resources()}
    if config.dashboard in taken:
        raise ConfigError(
            f"gateway.dashboard is {config.dashboard}, which is a path of the API: choose another."
        )
    app[_FEED] = feed
    app.on_shutdown.append(_end_feed)
    for path, asset in assets.items():
        app.router.add_get(path, _serve(asset, config.dashboard_port))
    app.router.add_get(FEED_PATH, watch)
    app.router.add_delete("/v1/lockstep/requests/{request_id}", cancel)


async def watch(request: web.Request) -> web.StreamResponse:
    """Answer GET /v1/lockstep/activity with events, one snapshot a second, until the client leaves.

    Raises:
        ApiError: 429 when too many pages are open.
    """
    feed, service = request.app[_FEED], request.app[SERVICE]
    if len(feed) >= VIEWERS_MAX:
        problem = f"{VIEWERS_MAX} pages are open already: close one."
        raise ApiError(429, problem, code="too_many_viewers", retry_after_s=30.0)
    response = web.StreamResponse(headers=_HEADERS)
    known = b""
    with feed.viewer() as viewer, contextlib.suppress(ConnectionError):
        await response.prepare(request)
        while data := await viewer.next():
            own = event("own", _own(service, request))
            async with asyncio.timeout(READ_S_MAX):
                await response.write(data if own == known else data + own)
            known = own
    return response


async def cancel(request: web.Request) -> web.Response:
    """Answer DELETE /v1/lockstep/requests/{request_id}: end an open request of the same tenant.

    Its client gets an error that says so.

    Raises:
        ApiError: 404 for a request that is not open in this gateway, or belongs to another tenant.
    """
    service, name = request.app[SERVICE], request.match_info["request_id"]
    choice = next((one for one in _visible(service, request) if one.request_id == name), None)
    if choice is None:
        raise ApiError(404, f"No open request has the id {name[:100]}.", code="not_found")
    # Its handler ends it at the scheduler too. Clients do not send a request with 499 again.
    problem = "The request was cancelled by an operator."
    choice.generation.fail(ApiError(499, problem, code="cancelled"))
    return json_response({"id": name, "cancelled": True})


async def _end_feed(app: web.Application) -> None:
    app[_FEED].end()


def _serve(asset: Asset, port: int) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def respond(request: web.Request) -> web.Response:
        local = request.get_extra_info("sockname")
        if port and local is not None and local[1] != port:
            raise web.HTTPNotFound
        return asset.response(request)

    return respond


def _tenant(request: web.Request) -> str | None:
    """Return the tenant whose requests a viewer may see; None: all, as without API keys."""
    return authentication.tenant(request) if authentication.key_name(request) else None


def _visible(service: CompletionService, request: web.Request) -> list[Choice]:
    tenant = _tenant(request)
    return [one for one in service.open_requests if tenant in (None, one.generation.tenant)]


def _own(service: CompletionService, request: web.Request) -> dict[str, object]:
    """Return what only the owner of a key sees."""
    return {
        "requests": [one.request_id for one in _visible(service, request)],
        "misses": service.open_requests.cache_misses.of(_tenant(request)),
    }
