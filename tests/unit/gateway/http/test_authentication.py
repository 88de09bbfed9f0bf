"""Authentication and host names: open paths, key names, own hosts."""

import pytest
from aiohttp.test_utils import make_mocked_request
from aiohttp.web import Request

from services.gateway.http.api_keys import ApiKeys
from services.gateway.http.authentication import (
    METRICS_PATHS,
    PROBES,
    Authenticator,
    cache_salt,
    key_name,
    tenant,
)
from services.gateway.http.cors import OriginPolicy
from services.gateway.http.errors import ApiError
from shared.clock import ManualClock
from shared.configuration.settings import GatewayConfig

_SECRET = "a-key-from-the-environment"


def _access(
    host: str, given: str = f"alice={_SECRET}", *, public_metrics: bool = False
) -> Authenticator:
    clock = ManualClock()
    config = GatewayConfig(host=host, public_metrics=public_metrics)
    return Authenticator(config, ApiKeys(config, given, clock), clock)


def _request(path: str, **headers: str) -> Request:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return make_mocked_request("GET", path, {"Host": "localhost", **named})


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("public_metrics", [False, True])
def test_metrics_need_api_key_at_every_address_unless_they_are_public(
    host: str, public_metrics: bool
) -> None:
    """Probes never need a key; behind a proxy all clients are local, so no address is exempt."""
    access = _access(host, public_metrics=public_metrics)

    for path in PROBES:
        access.check(_request(path))
    for path in METRICS_PATHS:
        access.check(_request(path, Authorization=f"Bearer {_SECRET}"))
        if public_metrics:
            access.check(_request(path))
        else:
            with pytest.raises(ApiError) as refused:
                access.check(_request(path))
            assert refused.value.status == 401


def test_metrics_need_no_api_key_when_gateway_has_none() -> None:
    """Without keys every path is open."""
    for path in METRICS_PATHS:
        _access("127.0.0.1", given="").check(_request(path))


@pytest.mark.parametrize(
    "path", ["/v1/models", "/health/", "//health", "/health/../v1/models", "/v1/models?/health"]
)
def test_path_that_resembles_health_probe_needs_api_key(path: str) -> None:
    """A path that resembles a probe's path needs a key."""
    with pytest.raises(ApiError):
        _access("127.0.0.1").check(_request(path))


def test_cache_salt_of_client_is_prefixed_with_its_api_key_name() -> None:
    """Without keys a client's salt is used unchanged; with a key it follows the key's name."""
    plain = _request("/v1/models", Authorization=f"Bearer {_SECRET}")
    _access("127.0.0.1", given="").check(plain)
    named = _request("/v1/models", x_api_key=_SECRET)
    _access("127.0.0.1").check(named)

    assert (key_name(plain), key_name(named)) == ("", "alice")
    assert (cache_salt(plain, None), cache_salt(plain, "s")) == ("", "s")
    assert cache_salt(named, None) == cache_salt(named, "") == "alice"
    assert cache_salt(named, "s").startswith("alice/")


def _is_own(config: GatewayConfig, host: str) -> bool:
    try:
        OriginPolicy(config).check(make_mocked_request("GET", "/", {"Host": host}))
    except ApiError as error:
        return error.status != 403
    return True


@pytest.mark.parametrize(
    ("bound", "own", "foreign"),
    [
        ("127.0.0.1", ["127.0.0.1:8080", "localhost"], ["192.168.1.5", "10.0.0.1", "evil.com"]),
        ("192.168.1.5", ["192.168.1.5:8080", "localhost"], ["192.168.1.6", "evil.com"]),
        ("llm.example", ["llm.example", "LLM.example:1"], ["x.llm.example", "evil.com"]),
        ("0.0.0.0", ["192.168.1.5:8080", "[fe80::1]:1", "0.0.0.0"], ["evil.com", "1.2.3.4.com"]),
        ("::", ["[::]:8080", "10.0.0.1", "[::1]"], ["evil.com", "::"]),
    ],
)
def test_gateway_accepts_only_host_names_of_its_bound_address(
    bound: str, own: list[str], foreign: list[str]
) -> None:
    """The bound address is own; if bound to all addresses, every IP address is."""
    config = GatewayConfig(host=bound)

    assert [host for host in own if not _is_own(config, host)] == []
    assert [host for host in foreign if _is_own(config, host)] == []
    configured = GatewayConfig(host=bound, allowed_hosts=["named.example"])
    assert _is_own(configured, "named.example:443")
    assert not _is_own(configured, "evil.com")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("192.0.2.7", "address 192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "address 2001:db8:1:2::"),
        ("::ffff:192.0.2.7", "address 192.0.2.7"),
        ("fe80::1%eth0", "address fe80::"),
        ("", "address "),
    ],
)
def test_clients_without_api_key_are_told_apart_by_ipv4_address_or_ipv6_network(
    address: str, expected: str
) -> None:
    """Without a key a tenant is an IPv4 address or the first 64 bits of an IPv6 address."""
    assert tenant(_request("/v1/models").clone(remote=address)) == expected


def test_tenant_with_key_is_key_name_at_every_address() -> None:
    """With a key a client counts by the key's name, wherever it connects from."""
    request = _request("/v1/models", Authorization=f"Bearer {_SECRET}").clone(remote="192.0.2.7")
    _access("127.0.0.1").check(request)

    assert tenant(request) == "key alice"
