"""Who asks: every request brings an API key where keys are configured, but for probes.

A load balancer's probes (`/health`, `/livez`, `/readyz`) need none. `/metrics` and `/openapi.json`
need none where only this machine can ask.
"""

import hashlib

from aiohttp import hdrs, web

from services.gateway.http.api_keys import ApiKeys
from services.gateway.http.errors import ApiError
from shared.clock import Clock
from shared.configuration.loading import is_loopback
from shared.configuration.settings import GatewayConfig
from shared.log import Log

PROBES = frozenset({"/health", "/livez", "/readyz"})
LOCAL_PATHS = frozenset({"/metrics", "/openapi.json"})
COMPLAIN_EVERY_S = 60.0
"""Refused keys are counted in the log so often."""

_KEY_NAME = web.RequestKey("key_name", str)

_log = Log("gateway.access")


class Authenticator:
    """Knows the keys and what may be had without one."""

    def __init__(self, config: GatewayConfig, keys: ApiKeys, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock
        self.needs_key = keys.are_required
        """Requests need a key ..."""
        self.open_paths = PROBES | LOCAL_PATHS if is_loopback(config.host) else PROBES
        """... but for these."""
        self._refused = 0
        self._complain_at_s = 0.0

    def check(self, request: web.Request) -> None:
        """Find out whose request this is.

        Raises:
            ApiError: 401; it needs a key and has none that counts. Nothing says which.
        """
        if not self.needs_key or request.path in self.open_paths:
            return
        name = self._keys.name_of(_presented(request))
        if name is None:
            self._complain(request.remote)
            raise ApiError(
                401,
                "A valid API key is needed: send it as `Authorization: Bearer KEY` or as "
                "`x-api-key: KEY`.",
                code="invalid_api_key",
                close=True,
            )
        request[_KEY_NAME] = name

    def _complain(self, remote: str | None) -> None:
        self._refused += 1
        now_s = self._clock.now()
        if now_s >= self._complain_at_s:
            _log.warning("api_keys_refused", count=self._refused, lately_by=remote)
            self._refused = 0
            self._complain_at_s = now_s + COMPLAIN_EVERY_S


def key_name(request: web.Request) -> str:
    """Return the name of the key that a request has brought; "" where none is needed."""
    name: str = request.get(_KEY_NAME, "")
    return name


def cache_salt(request: web.Request, own: str | None) -> str:
    """Return what separates a request's blocks from other tenants'.

    That is the name of its key; what the client asks for divides that tenant's blocks further, and
    can never be the name of another: those have no slash.
    """
    name = key_name(request)
    if not name:
        return own or ""
    if not own:
        return name
    return f"{name}/{hashlib.blake2b(own.encode(), digest_size=32).hexdigest()}"


def _presented(request: web.Request) -> bytes:
    """Return the key as it was sent; b"" for none."""
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() != "bearer":
        token = request.headers.get("x-api-key", "")
    # Bytes that are no UTF-8 come as half surrogate pairs.
    return token.strip().encode(errors="surrogateescape")
