"""API key checks of requests. Owns which paths need a key; the keys themselves are in `api_keys`.

Health probes (`/health`, `/livez`, `/readyz`) never need a key. `/metrics` and `/openapi.json` need
none with `gateway.public_metrics`. An address says nothing: behind a proxy all clients are local.
"""

import hashlib
import ipaddress

from aiohttp import hdrs, web

from services.gateway.http.api_keys import ApiKey, ApiKeys
from services.gateway.http.errors import closing
from shared.clock import Clock
from shared.configuration.settings import GatewayConfig
from shared.log import Log

PROBES = frozenset({"/health", "/livez", "/readyz"})
METRICS_PATHS = frozenset({"/metrics", "/openapi.json"})
WARNING_INTERVAL_S = 60.0
"""Shortest time between two warnings about refused keys."""

_KEY = web.RequestKey("api_key", ApiKey)

_log = Log("gateway.access")


class Authenticator:
    """Refusal of requests without a valid API key; the paths in `open_paths` need none."""

    def __init__(
        self,
        config: GatewayConfig,
        keys: ApiKeys,
        clock: Clock,
        page_paths: frozenset[str] = frozenset(),
    ) -> None:
        """Create the check.

        Args:
            config: says whether metrics need a key.
            keys: the valid keys.
            clock: times warnings.
            page_paths: paths of the page's files, which show nothing by themselves.
        """
        self._keys = keys
        self._clock = clock
        self.needs_key = keys.are_required
        """Requests need a key, except for `open_paths`."""
        self.open_paths = PROBES | METRICS_PATHS if config.public_metrics else PROBES
        self._page_paths = page_paths
        self._refused = 0
        self._warn_at_s = 0.0

    def check(self, request: web.Request) -> None:
        """Refuse a request without a valid API key; else store the key in the request.

        Does nothing for `open_paths`, or if the gateway has no keys.

        Raises:
            ApiError: 401 when the request's key is missing or is not a valid one.
        """
        if not self.needs_key or request.path in self.open_paths | self._page_paths:
            return
        key = self._keys.find(_sent_key(request))
        if key is None:
            self._count_refusal(request.remote)
            raise closing(
                401,
                "A valid API key is required: send it as `Authorization: Bearer KEY` or as "
                "`x-api-key: KEY`.",
                "invalid_api_key",
            )
        request[_KEY] = key

    def _count_refusal(self, remote: str | None) -> None:
        self._refused += 1
        now_s = self._clock.now()
        if now_s >= self._warn_at_s:
            _log.warning("api_keys_refused", count=self._refused, last_address=remote)
            self._refused = 0
            self._warn_at_s = now_s + WARNING_INTERVAL_S


def key_name(request: web.Request) -> str:
    """Return the name of the request's API key, "" if its path or the gateway needs no key."""
    key = request.get(_KEY)
    return key.name if key is not None else ""


def tenant(request: web.Request) -> str:
    """Return the name of the tenant that a request counts for.

    It is the API key's name or, without keys, the client's address. Of an IPv6 address only the
    first 64 bits count, because one client usually has all addresses with them.
    """
    name = key_name(request)
    return f"key {name}" if name else address_tenant(request.remote or "")


def owner(request: web.Request) -> str:
    """Return who owns what a request stores: its tenant or, without keys, all clients together.

    A client without a key may have another address the next time.
    """
    return tenant(request) if key_name(request) else ""


def weight(request: web.Request) -> float:
    """Return the weight of the tenant that a request counts for; 1 without an API key."""
    key = request.get(_KEY)
    return key.weight if key is not None else 1.0


def address_tenant(address: str) -> str:
    """Return the name of the tenant without a key that has this IP address, "" for no address."""
    return f"address {_network(address)}"


def cache_salt(request: web.Request, own: str | None) -> str:
    """Return the salt of a request, which keeps its cached blocks apart from other clients' blocks.

    Only requests with equal salts share cached blocks. With an API key the salt begins with the
    key's name, which has no slash, so no client can make another key's salt.

    Args:
        request: a request that was authenticated.
        own: the salt that the client sent, None without one.
    """
    name = key_name(request)
    if not name:
        return own or ""
    if not own:
        return name
    return f"{name}/{hashlib.blake2b(own.encode(), digest_size=32).hexdigest()}"


def _network(address: str) -> str:
    """Return an IPv4 address, or the first 64 bits of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    mapped = parsed.ipv4_mapped
    return str(mapped or ipaddress.ip_network((parsed, 64), strict=False).network_address)


def _sent_key(request: web.Request) -> bytes:
    """Return the request's key as bytes, b"" when it has none."""
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() != "bearer":
        token = request.headers.get("x-api-key", "")
    # aiohttp decodes bytes that are not UTF-8 to lone surrogates.
    return token.strip().encode(errors="surrogateescape")
