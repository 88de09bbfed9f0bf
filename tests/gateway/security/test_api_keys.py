"""API keys over HTTP: requests without a key get a 401; each key name has its own cache."""

import http.client
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from services.commands.keys import api_key
from shared.configuration.loading import API_KEYS_VARIABLE
from shared.limits import CACHE_SALT_CHARS_MAX
from shared.messages import RequestFailed
from tests.gateway.running_gateway import RunningGateway, start_error
from tests.gateway.scripted_scheduler import generated
from tests.support.ports import free_port
from tests.support.waiting import wait_until

_CHAT = "/v1/chat/completions"
_OK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
_ENVIRONMENT_KEY = "an-operator-has-thought-of-this"


def _new(path: Path, name: str, weight: float = 1.0) -> str:
    return api_key.new(path, name, weight).split()[0]


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _wait_status(gateway: RunningGateway, key: str, expected: int) -> None:
    """GET until the status is `expected`: the gateway checks the file once a second."""
    wait_until(lambda: gateway.get("/v1/models", _bearer(key))[0] == expected, 10.0, poll_s=0.1)


class KeyedGateway:
    """A gateway with keys, and the keys."""

    def __init__(self, gateway: RunningGateway, path: Path, alice: str, bob: str) -> None:
        self.gateway = gateway
        self.path = path
        self.alice = alice
        self.bob = bob


@pytest.fixture(scope="module")
def shared_keyed(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KeyedGateway]:
    """A gateway with two keys in a file and one in its environment."""
    folder = tmp_path_factory.mktemp("keys")
    path = folder / "api-keys"
    alice, bob = _new(path, "alice"), _new(path, "bob", 2.5)
    settings: dict[str, Any] = {"api_keys_file": str(path)}
    environment = {API_KEYS_VARIABLE: f"carol={_ENVIRONMENT_KEY}"}
    with RunningGateway.start(model_folder, folder, environment=environment, **settings) as running:
        yield KeyedGateway(running, path, alice, bob)


@pytest.fixture
def keyed(shared_keyed: KeyedGateway) -> KeyedGateway:
    """The module's gateway, with the scheduler's script and records reset."""
    shared_keyed.gateway.scheduler.reset()
    return shared_keyed


_MALFORMED: list[dict[str, str]] = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer "},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Bearer " + "x" * 8_000},
    {"Authorization": "Basic YWxpY2U6eA=="},
    {"Authorization": "alice"},
    {"Authorization": "Bearer alice"},
    {"Authorization": "Bearer k\xe9y"},
    {"Authorization": "Bearer k\u00c3\u00a9y"},
    {"Authorization": "Bearer \xff\xfe"},
    {"x-api-key": "wrong"},
    {"x-api-key": ""},
    {"X-Api-Key": "k\xe9y"},
]


@pytest.mark.parametrize("headers", _MALFORMED)
def test_missing_and_wrong_api_keys_get_byte_identical_401(
    keyed: KeyedGateway, headers: dict[str, str]
) -> None:
    """B21: missing, empty, wrong, long and non-ASCII keys get the same 401, byte for byte."""
    gateway = keyed.gateway
    expected = gateway.post(_CHAT, _OK)
    status, body, response_headers = gateway.post(_CHAT, _OK, headers)
    assert status == 401
    assert body == expected[1]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == (
        "invalid_request_error", "invalid_api_key",
    )  # fmt: skip
    assert response_headers["www-authenticate"] == 'Bearer realm="lockstep"'
    assert gateway.scheduler.submitted == []


@pytest.mark.parametrize("value", [b"Bearer a\x00b", b"Bearer a\r\n b", b"Bearer " + b"x" * 2**20])
def test_api_key_header_with_invalid_http_is_refused_with_4xx(
    keyed: KeyedGateway, value: bytes
) -> None:
    """B21: a NUL, a folded line and a mebibyte are refused by the HTTP parser with a 4xx."""
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: " + value + b"\r\n\r\n"
    response = keyed.gateway.send(head, 2.0)
    assert response == b"" or response.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), response[:100]
    assert keyed.gateway.get("/health")[0] == 200


def test_api_key_in_url_query_is_ignored(keyed: KeyedGateway) -> None:
    """B22: a key in the URL does not count, because URLs end up in logs."""
    for name in ("api_key", "key", "access_token", "Authorization"):
        assert keyed.gateway.get(f"/v1/models?{name}={keyed.alice}")[0] == 401


def test_valid_api_key_is_accepted_as_bearer_token_and_x_api_key(keyed: KeyedGateway) -> None:
    """Keys from file and environment work as a bearer token in any case, and as x-api-key."""
    for key in (keyed.alice, keyed.bob, _ENVIRONMENT_KEY):
        for headers in (
            {"Authorization": f"Bearer {key}"},
            {"authorization": f"bearer {key}"},
            {"x-api-key": key},
        ):
            assert keyed.gateway.get("/v1/models", headers)[0] == 200
            assert keyed.gateway.post(_CHAT, _OK, headers)[0] == 200


def test_scheduler_is_told_tenant_and_weight_of_each_request(keyed: KeyedGateway) -> None:
    """Requests carry the name and the weight of their key, by which tenants take turns."""
    for key in (keyed.alice, keyed.bob, _ENVIRONMENT_KEY):
        assert keyed.gateway.post(_CHAT, _OK, _bearer(key))[0] == 200
    told = [(request.tenant, request.weight) for request in keyed.gateway.scheduler.submitted]
    assert told == [("key alice", 1.0), ("key bob", 2.5), ("key carol", 1.0)]


def test_openai_client_is_served_with_api_key_and_refused_with_wrong_one(
    keyed: KeyedGateway,
) -> None:
    """The client's api_key is the key; with a wrong one it raises AuthenticationError."""
    url = f"{keyed.gateway.url}/v1"
    with openai.OpenAI(base_url=url, api_key=keyed.alice, max_retries=0) as client:
        assert client.models.list().data[0].id == "tiny"
    with (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_only_health_probes_and_page_are_served_without_api_key(keyed: KeyedGateway) -> None:
    """Probes and the empty page are open; its data, metrics and the OpenAPI document are not, and
    unknown paths get a 401."""
    for path in ("/health", "/livez", "/readyz", "/"):
        assert keyed.gateway.get(path)[0] == 200, path
    for path in (
        "/metrics",
        "/openapi.json",
        "/v1/models",
        "/v1/models/tiny",
        "/v1/lockstep/status",
        "/v1/lockstep/activity",
        "/v1/lockstep/trace?seconds=1",
        "/health/",
        "/nothing",
    ):
        assert keyed.gateway.get(path)[0] == 401, path
    for path in (_CHAT, "/v1/completions", "/v1/nothing"):
        assert keyed.gateway.post(path, _OK)[0] == 401, path


def test_request_without_api_key_is_refused_before_its_body_is_read(keyed: KeyedGateway) -> None:
    """The gateway answers after the headers and closes the connection."""
    head = (
        f"POST {_CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 10000000\r\n\r\n"
    )
    response = keyed.gateway.send(head.encode() + b" " * 1_000, 8.0)
    assert response.startswith(b"HTTP/1.1 401 ")
    assert b"Connection: close\r\n" in response


def test_cache_salt_sent_to_scheduler_starts_with_api_key_name(keyed: KeyedGateway) -> None:
    """Blocks are salted with the key's name, and a client's salt cannot name another tenant."""
    gateway = keyed.gateway
    given = [
        (keyed.alice, None), (keyed.alice, ""), (keyed.bob, None), (_ENVIRONMENT_KEY, None),
        (keyed.alice, "bob"), (keyed.bob, "alice"), (keyed.alice, "s"), (keyed.bob, "s"),
        (keyed.alice, "s"), (keyed.alice, "x" * CACHE_SALT_CHARS_MAX),
    ]  # fmt: skip
    for key, salt in given:
        assert gateway.post(_CHAT, {**_OK, "cache_salt": salt}, _bearer(key))[0] == 200
    salts = [request.cache_salt for request in gateway.scheduler.submitted]
    assert salts[:4] == ["alice", "alice", "bob", "carol"]
    assert salts[6] == salts[8]
    assert len(set(salts[2:8])) == 6
    assert all(len(salt) <= CACHE_SALT_CHARS_MAX for salt in salts)
    assert all(salt.startswith(("alice/", "bob/")) for salt in salts[4:])


@pytest.mark.proof
def test_added_and_removed_api_keys_take_effect_without_restart(
    model_folder: Path, tmp_path: Path
) -> None:
    """Added and removed keys count about a second later; a broken file changes nothing."""
    path = tmp_path / "api-keys"
    alice = _new(path, "alice")
    settings: dict[str, Any] = {"api_keys_file": str(path)}
    with RunningGateway.start(model_folder, tmp_path, **settings) as gateway:
        _wait_status(gateway, alice, 200)
        bob = _new(path, "bob")
        _wait_status(gateway, bob, 200)
        api_key.remove(path, "alice")
        _wait_status(gateway, alice, 401)
        valid = path.read_text()
        path.write_text("no key at all\n")
        for _ in range(15):
            assert gateway.get("/v1/models", _bearer(bob))[0] == 200
            time.sleep(0.1)
        path.write_text(valid)
        api_key.remove(path, "bob")
        _wait_status(gateway, bob, 401)
        logged = gateway.stop()
    assert logged.count("api_keys_unreadable") == 1
    assert "line 1" in logged


def test_api_keys_never_appear_in_logs_or_responses(model_folder: Path, tmp_path: Path) -> None:
    """No key, valid or not, is in logs, responses or files; key names are in the log."""
    path = tmp_path / "api-keys"
    alice = _new(path, "alice")
    wrong = "lockstep-" + "w" * 43
    settings: dict[str, Any] = {"api_keys_file": str(path), "stream_buffer_bytes_max": 4_096}
    environment = {
        API_KEYS_VARIABLE: f"carol={_ENVIRONMENT_KEY}",
        "PYTHONASYNCIODEBUG": "1",
    }
    responses = []
    with RunningGateway.start(
        model_folder, tmp_path, environment=environment, **settings
    ) as gateway:
        for key in (alice, _ENVIRONMENT_KEY, wrong):
            bodies: tuple[Any, ...] = (
                _OK,
                {**_OK, "n": 0},
                {**_OK, "stream": True, "n": 9},
                b"\xff",
                {},
            )
            responses += [str(gateway.post(_CHAT, body, _bearer(key))) for body in bodies]
            responses.append(str(gateway.get("/v1/lockstep/status", {"x-api-key": key})))
            responses.append(str(gateway.get(f"/{key}", _bearer(key))))
            responses.append(
                str(gateway.send(f"GET / HTTP/1.1\r\nA: {key}\r\n\x00\r\n".encode(), 1))
            )
        gateway.scheduler.reply = _fail
        events = _stream(gateway, alice)
        assert "error" in events
        responses.append(events)
        responses.append(str(gateway.get("/metrics", _bearer(alice))))
        logged = gateway.stop()
    for secret in (alice, _ENVIRONMENT_KEY, wrong):
        assert secret.removeprefix("lockstep-") not in logged
        assert secret not in "".join(responses).replace(f"/{secret}", "")
        assert secret not in path.read_text()
    assert re.search(r"stream_failed .*key=alice", logged)
    assert re.search(r"api_keys_refused .*count=", logged)


def _stream(gateway: RunningGateway, key: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
    body = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"x"}]}'
    headers = {"Content-Type": "application/json", **_bearer(key)}
    connection.request("POST", _CHAT, body, headers)
    try:
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def _fail(request: Any) -> Any:
    yield generated(request, 0, [40])
    yield 0.1
    yield RequestFailed(request_id=request.request_id, cause="failed", detail="It broke.")


@pytest.mark.parametrize(
    ("write", "cause"),
    [
        (None, "There is no file .*lockstep api-key new"),
        ("", "holds no API key.*lockstep api-key new"),
        ("alice secret-in-plain-text\n", "line 1, is not a name, a salt and a digest"),
    ],
)
def test_gateway_exits_with_78_when_api_key_file_is_invalid(
    model_folder: Path, tmp_path: Path, write: str | None, cause: str
) -> None:
    """The exit code is 78, and one sentence has the remedy but nothing of the file's content."""
    path = tmp_path / "api-keys"
    if write is not None:
        path.write_text(write)
        path.chmod(0o600)
    logged = _start_error(model_folder, tmp_path, path)
    assert re.search(cause, logged)
    assert "secret-in-plain-text" not in logged


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606, 0o660])
def test_gateway_exits_when_other_users_can_access_api_key_file(
    model_folder: Path, tmp_path: Path, mode: int
) -> None:
    """A file that others can read or write stops the start, and the message has the remedy."""
    path = tmp_path / "api-keys"
    _new(path, "alice")
    path.chmod(mode)
    assert f"run `chmod 600 {path}`" in _start_error(model_folder, tmp_path, path)


def _start_error(model_folder: Path, run_dir: Path, path: Path) -> str:
    settings = {
        "model": {"path": str(model_folder)},
        "paths": {"run_dir": str(run_dir)},
        "gateway": {"port": free_port(), "api_keys_file": str(path)},
    }
    return start_error(settings)
