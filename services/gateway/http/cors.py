"""What web pages may do: host names that were rebound and foreign origins are refused.

A page in the user's browser reaches servers on the user's machine and network. Its own name can be
made to resolve to our address (DNS rebinding), so the Host header must be a name of ours; and what
another origin posts is refused unless the operator has named that origin. Without such names no
response has a CORS header.
"""

import ipaddress
import urllib.parse

from aiohttp import hdrs, web

from services.gateway.http import cache_header
from services.gateway.http.errors import ApiError
from shared.configuration.loading import is_loopback
from shared.configuration.settings import GatewayConfig

PREFLIGHT_S = 600
"""A browser asks again after so long whether an origin may post."""

_SAFE_METHODS = frozenset({hdrs.METH_GET, hdrs.METH_HEAD})


class OriginPolicy:
    """Decides by the headers Host and Origin."""

    def __init__(self, config: GatewayConfig) -> None:
        self._names = frozenset(name.lower() for name in [config.host, *config.allowed_hosts])
        self._origins = frozenset(origin.lower() for origin in config.allowed_origins)
        # Who listens on all addresses does not know them. Names can be rebound, addresses not.
        self._takes_addresses = config.host in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound

    def check(self, request: web.Request) -> None:
        """Refuse foreign host names, and other origins' posts and preflights.

        Raises:
            ApiError: 403.
        """
        host = request.headers.get(hdrs.HOST, "")
        if len(request.headers.getall(hdrs.HOST, ())) > 1 or not self._is_own(host):
            raise ApiError(
                403,
                "The Host header does not name this server: names that it should answer to belong "
                "into gateway.allowed_hosts.",
                code="host_not_allowed",
                close=True,
            )
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or request.method in _SAFE_METHODS or self._allows(origin):
            return
        # A page that this server itself had sent would have an origin with its very host and port.
        if origin.partition("://")[2] != host or request.method == hdrs.METH_OPTIONS:
            raise ApiError(
                403,
                "Requests from web pages of other origins are refused, but for those in "
                "gateway.allowed_origins.",
                code="origin_not_allowed",
                close=True,
            )

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the answer to a browser that asks whether it may post; None for other requests."""
        is_asked = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if request.method != hdrs.METH_OPTIONS or hdrs.ORIGIN not in request.headers:
            return None
        wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
            # Clients' libraries send headers of their own (OpenAI's: x-stainless-*).
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: wanted,
            hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_S),
        }
        return web.Response(status=204, headers=headers if is_asked else {})

    def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let an allowed origin read a response."""
        if not self._origins:
            return
        response.headers[hdrs.VARY] = hdrs.ORIGIN
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is not None and self._allows(origin):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = (
                f"{cache_header.HEADER}, {hdrs.RETRY_AFTER}"
            )

    def _allows(self, origin: str) -> bool:
        return origin.lower() in self._origins

    def _is_own(self, host: str) -> bool:
        name = _name_of(host)
        if name is None:
            return False
        return name in self._names or is_loopback(name) or (self._takes_addresses and _is_ip(name))


def _name_of(host: str) -> str | None:
    """Return the name or address of a Host header without its port; None when it has neither."""
    try:
        parts = urllib.parse.urlsplit(f"//{host}")
        name, _ = parts.hostname, parts.port
    except ValueError:
        return None
    return name if parts.netloc == host and "@" not in host else None


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
