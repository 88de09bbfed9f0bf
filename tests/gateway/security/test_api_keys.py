"""API keys over HTTP: who has none gets a 401 and nothing else; tenants do not share prefixes."""

import http.client
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from services.commands import api_key
from shared.configuration.loading import API_KEYS_VARIABLE
from shared.limits import CACHE_SALT_CHARS_MAX
from shared.messages import RequestFailed
from tests.gateway.running_gateway import RunningGateway, launch
from tests.gateway.scripted_scheduler import generated
from tests.ports import free_port

_CHAT = "/v1/chat/completions"
_OK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
_GIVEN = "an-operator-has-thought-of-this"


def _new(path: Path, name: str) -> str:
    return api_key.new(path, name).split()[0]


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _wait_status(gateway: RunningGateway, key: str, expected: int) -> None:
    """Ask until the answer has this status: the file is looked at once a second."""
    until_s = time.monotonic() + 10
    while gateway.get("/v1/models", _bearer(key))[0] != expected:
        assert time.monotonic() < until_s
        time.sleep(0.1)


class Locked:
    """A gateway with keys, and the keys."""

    def __init__(self, gateway: RunningGateway, path: Path, alice: str, bob: str) -> None:
        self.gateway = gateway
        self.path = path
        self.alice = alice
        self.bob = bob


@pytest.fixture(scope="module")
def shared_locked(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    """A gateway with two keys in a file and one in its environment."""
    folder = tmp_path_factory.mktemp("keys")
    path = folder / "api-keys"
    alice, bob = _new(path, "alice"), _new(path, "bob")
    settings: dict[str, Any] = {"api_keys_file": str(path)}
    environment = {API_KEYS_VARIABLE: f"carol={_GIVEN}"}
    with RunningGateway.start(model_folder, folder, environment=environment, **settings) as running:
        yield Locked(running, path, alice, bob)


@pytest.fixture
def locked(shared_locked: Locked) -> Locked:
    """The module's gateway, with a scheduler that has forgotten the test before."""
    shared_locked.gateway.scheduler.reset()
    return shared_locked


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
def test_without_a_key_there_is_one_answer(locked: Locked, headers: dict[str, str]) -> None:
    """B21: missing, empty, wrong, long, not ASCII: the same 401, byte for byte, never a 500."""
    gateway = locked.gateway
    expected = gateway.post(_CHAT, _OK)
    status, body, answered = gateway.post(_CHAT, _OK, headers)
    assert status == 401
    assert body == expected[1]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == (
        "invalid_request_error", "invalid_api_key",
    )  # fmt: skip
    assert answered["www-authenticate"] == 'Bearer realm="lockstep"'
    assert gateway.scheduler.orders == []


@pytest.mark.parametrize("value", [b"Bearer a\x00b", b"Bearer a\r\n b", b"Bearer " + b"x" * 2**20])
def test_keys_that_no_header_can_hold(locked: Locked, value: bytes) -> None:
    """B21: a NUL, a folded line and a mebibyte are refused by the parser: a 4xx, and closed."""
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: " + value + b"\r\n\r\n"
    answer = locked.gateway.send(head, 2.0)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer[:100]
    assert locked.gateway.get("/health")[0] == 200


def test_a_key_in_the_query_does_not_count(locked: Locked) -> None:
    """B22: addresses end up in logs, so keys have no business there."""
    for name in ("api_key", "key", "access_token", "Authorization"):
        assert locked.gateway.get(f"/v1/models?{name}={locked.alice}")[0] == 401


def test_a_key_opens_the_door(locked: Locked) -> None:
    """As a bearer token in any case, and as x-api-key; from the file and the environment."""
    for key in (locked.alice, locked.bob, _GIVEN):
        for headers in (
            {"Authorization": f"Bearer {key}"},
            {"authorization": f"bearer {key}"},
            {"x-api-key": key},
        ):
            assert locked.gateway.get("/v1/models", headers)[0] == 200
            assert locked.gateway.post(_CHAT, _OK, headers)[0] == 200


def test_openais_client_sends_it(locked: Locked) -> None:
    """The client's api_key is our key; without a right one it raises its own error."""
    url = f"{locked.gateway.url}/v1"
    with openai.OpenAI(base_url=url, api_key=locked.alice, max_retries=0) as client:
        assert client.models.list().data[0].id == "tiny"
    with (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_what_needs_no_key(locked: Locked) -> None:
    """Probes and, on loopback, metrics and the document; nothing else, not even a 404."""
    for path in ("/health", "/livez", "/readyz", "/metrics", "/openapi.json"):
        assert locked.gateway.get(path)[0] == 200, path
    for path in (
        "/v1/models",
        "/v1/models/tiny",
        "/v1/lockstep/status",
        "/",
        "/health/",
        "/nothing",
    ):
        assert locked.gateway.get(path)[0] == 401, path
    for path in (_CHAT, "/v1/completions", "/v1/nothing"):
        assert locked.gateway.post(path, _OK)[0] == 401, path


def test_a_body_without_a_key_is_not_waited_for(locked: Locked) -> None:
    """A stranger's upload is refused by its headers, and the connection ends."""
    head = (
        f"POST {_CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 10000000\r\n\r\n"
    )
    answer = locked.gateway.send(head.encode() + b" " * 1_000, 8.0)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"Connection: close\r\n" in answer


def test_the_name_of_the_key_separates_tenants(locked: Locked) -> None:
    """Blocks are salted with the key's name; what a client adds can never name another tenant."""
    gateway = locked.gateway
    asked = [
        (locked.alice, None), (locked.alice, ""), (locked.bob, None), (_GIVEN, None),
        (locked.alice, "bob"), (locked.bob, "alice"), (locked.alice, "s"), (locked.bob, "s"),
        (locked.alice, "s"), (locked.alice, "x" * CACHE_SALT_CHARS_MAX),
    ]  # fmt: skip
    for key, salt in asked:
        assert gateway.post(_CHAT, {**_OK, "cache_salt": salt}, _bearer(key))[0] == 200
    salts = [order.cache_salt for order in gateway.scheduler.orders]
    assert salts[:4] == ["alice", "alice", "bob", "carol"]
    assert salts[6] == salts[8]
    assert len(set(salts[2:8])) == 6
    assert all(len(salt) <= CACHE_SALT_CHARS_MAX for salt in salts)
    assert all(salt.startswith(("alice/", "bob/")) for salt in salts[4:])


@pytest.mark.proof
def test_the_file_is_read_again(model_folder: Path, tmp_path: Path) -> None:
    """A new key counts and a removed one does not, about a second later; a slip changes nothing."""
    path = tmp_path / "api-keys"
    alice = _new(path, "alice")
    settings: dict[str, Any] = {"api_keys_file": str(path)}
    with RunningGateway.start(model_folder, tmp_path, **settings) as gateway:
        _wait_status(gateway, alice, 200)
        bob = _new(path, "bob")
        _wait_status(gateway, bob, 200)
        api_key.remove(path, "alice")
        _wait_status(gateway, alice, 401)
        right = path.read_text()
        path.write_text("no key at all\n")
        for _ in range(15):
            assert gateway.get("/v1/models", _bearer(bob))[0] == 200
            time.sleep(0.1)
        path.write_text(right)
        api_key.remove(path, "bob")
        _wait_status(gateway, bob, 401)
        logged = gateway.stop()
    assert logged.count("api_keys_unreadable") == 1
    assert "line 1" in logged


def test_secrets_are_never_logged(model_folder: Path, tmp_path: Path) -> None:
    """Whatever is sent, right or wrong: no key is in logs, answers or files; names are."""
    path = tmp_path / "api-keys"
    alice = _new(path, "alice")
    wrong = "lockstep-" + "w" * 43
    settings: dict[str, Any] = {"api_keys_file": str(path), "stream_buffer_bytes_max": 4_096}
    environment = {
        API_KEYS_VARIABLE: f"carol={_GIVEN}",
        "PYTHONASYNCIODEBUG": "1",
    }
    answers = []
    with RunningGateway.start(
        model_folder, tmp_path, environment=environment, **settings
    ) as gateway:
        for key in (alice, _GIVEN, wrong):
            bodies: tuple[Any, ...] = (
                _OK,
                {**_OK, "n": 0},
                {**_OK, "stream": True, "n": 9},
                b"\xff",
                {},
            )
            answers += [str(gateway.post(_CHAT, body, _bearer(key))) for body in bodies]
            answers.append(str(gateway.get("/v1/lockstep/status", {"x-api-key": key})))
            answers.append(str(gateway.get(f"/{key}", _bearer(key))))
            answers.append(str(gateway.send(f"GET / HTTP/1.1\r\nA: {key}\r\n\x00\r\n".encode(), 1)))
        gateway.scheduler.reply = _fail
        events = _stream(gateway, alice)
        assert "error" in events
        answers.append(events)
        answers.append(str(gateway.get("/metrics")))
        logged = gateway.stop()
    for secret in (alice, _GIVEN, wrong):
        assert secret.removeprefix("lockstep-") not in logged
        assert secret not in "".join(answers).replace(f"/{secret}", "")
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
def test_keys_that_cannot_be_used_end_the_start(
    model_folder: Path, tmp_path: Path, write: str | None, cause: str
) -> None:
    """One sentence with the remedy, exit code 78, and nothing of the file's content."""
    path = tmp_path / "api-keys"
    if write is not None:
        path.write_text(write)
        path.chmod(0o600)
    logged = _fails(model_folder, tmp_path, path)
    assert re.search(cause, logged)
    assert "secret-in-plain-text" not in logged


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606, 0o660])
def test_a_file_that_others_reach_ends_the_start(
    model_folder: Path, tmp_path: Path, mode: int
) -> None:
    """Also one that others can only read or only write; the remedy is named."""
    path = tmp_path / "api-keys"
    _new(path, "alice")
    path.chmod(mode)
    assert f"run `chmod 600 {path}`" in _fails(model_folder, tmp_path, path)


def _fails(model_folder: Path, run_dir: Path, path: Path) -> str:
    settings = {
        "model": {"path": str(model_folder)},
        "paths": {"run_dir": str(run_dir)},
        "gateway": {"port": free_port(), "api_keys_file": str(path)},
    }
    with launch(settings) as process:
        try:
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 78, errors
    assert b"Traceback" not in errors
    return errors.decode()
