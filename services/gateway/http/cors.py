"""Host and Origin policy: protection against DNS rebinding and posts from foreign web pages.

A page in a user's browser can reach servers on the user's machine and network, and its host name
can be made to resolve to this server's address (DNS rebinding). So the Host header must name this
server, and posts from other origins are refused unless the operator allows the origin. Without
allowed origins no response has a CORS header.
"""

import ipaddress
import urllib.parse

from aiohttp import hdrs, web

from services.gateway.http import cache_header, ignored_fields
from services.gateway.http.authentication import PROBES
from services.gateway.http.errors import closing
from shared.configuration.host_addresses import is_loopback
from shared.configuration.settings import GatewayConfig

PREFLIGHT_S = 600
"""Time for which a browser may cache the answer to a preflight request."""

_SAFE_METHODS = frozenset({hdrs.METH_GET, hdrs.METH_HEAD})


class OriginPolicy:
    """Refusal of requests by their Host and Origin headers, and the CORS headers of responses.

    It protects the server from DNS rebinding and from posts of foreign web pages.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._names = frozenset(name.lower() for name in [config.host, *config.allowed_hosts])
        self._origins = frozenset(origin.lower() for origin in config.allowed_origins)
        # A server on all addresses does not know its own. Names can be rebound, addresses cannot.
        self._accepts_addresses = config.host in ("0.0.0.0", "::")  # noqa: S104

    def check(self, request: web.Request) -> None:
        """Refuse a request whose Host header does not name this server or whose origin is foreign.

        The origin is compared for all methods except GET and HEAD: it must be in
        `gateway.allowed_origins` or, except for OPTIONS, have the same host and port as the Host
        header. Health probes over HTTP/1.0 may have no Host header; browsers always send one.

        Raises:
            ApiError: 403 when the Host or Origin header is not allowed.
        """
        if hdrs.HOST not in request.headers and request.path in PROBES:
            return
        host = request.headers.get(hdrs.HOST, "")
        if len(request.headers.getall(hdrs.HOST, ())) > 1 or not self._names_this_server(host):
            raise closing(
                403,
                "The Host header does not name this server. Add the name to gateway.allowed_hosts.",
                "host_not_allowed",
            )
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or request.method in _SAFE_METHODS or self._allows(origin):
            return
        # A page that this server itself has sent has an origin with the same host and port.
        if origin.partition("://")[2] != host or request.method == hdrs.METH_OPTIONS:
            raise closing(
                403,
                "Requests from web pages of this origin are refused. Add the origin to "
                "gateway.allowed_origins.",
                "origin_not_allowed",
            )

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return a 204 for an OPTIONS request with an Origin header (CORS preflight), else None."""
        is_preflight = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if request.method != hdrs.METH_OPTIONS or hdrs.ORIGIN not in request.headers:
            return None
        requested_headers = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
            # Clients' libraries send headers of their own (OpenAI's: x-stainless-*).
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: requested_headers,
            hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_S),
        }
        return web.Response(status=204, headers=headers if is_preflight else {})

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the CORS headers that let a web page read the response, if its origin is allowed."""
        if not self._origins:
            return
        response.headers[hdrs.VARY] = hdrs.ORIGIN
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is not None and self._allows(origin):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = (
                f"{cache_header.HEADER}, {ignored_fields.HEADER}, {hdrs.RETRY_AFTER}"
            )

    def _allows(self, origin: str) -> bool:
        return origin.lower() in self._origins

    def _names_this_server(self, host: str) -> bool:
        name = _host_name(host)
        return name is not None and (
            name in self._names or is_loopback(name) or (self._accepts_addresses and _is_ip(name))
        )


def _host_name(host: str) -> str | None:
    """Return the name or address in a Host header without its port, None when it has neither."""
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
