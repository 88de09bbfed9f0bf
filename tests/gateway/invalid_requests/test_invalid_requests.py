"""Invalid HTTP requests: a 4xx at once, nothing reaches the scheduler, the gateway still serves."""

import gzip
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running_gateway import FORGET_FULL_QUEUE, RunningGateway

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_OK = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
_TIMEOUT_S = 1.0
_CLOSED_WITHIN_S = 8.0
"""Seconds within which a gateway with a timeout of `_TIMEOUT_S` closes, also on a busy machine."""


@pytest.fixture(scope="module")
def impatient_gateway(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway with short timeouts, for requests that are never complete."""
    settings: dict[str, Any] = {"header_timeout_s": _TIMEOUT_S, "body_timeout_s": _TIMEOUT_S}
    run_dir = tmp_path_factory.mktemp("impatient")
    with RunningGateway.start(
        model_folder, run_dir, prelude=FORGET_FULL_QUEUE, **settings
    ) as running:
        yield running


def _nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def _check_refused(
    gateway: RunningGateway, expected: int, path: str, body: Any, **headers: str
) -> Any:
    """POST and check the status, OpenAI's error format, and that the scheduler got nothing."""
    status, response, _ = gateway.post(
        path, body, {name.replace("_", "-"): value for name, value in headers.items()}
    )
    assert status == expected, response
    assert set(response["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response["error"]["message"]
    assert gateway.scheduler.submitted == []
    return response["error"]


def _post_bytes(head: str, body: bytes = b"") -> bytes:
    return f"POST {_CHAT} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "body", [b"", b"x", b"[]", b"[" * 100_000, b'{"a":"\xff"}', b'{"model":"\\ud800"}', b"{}"]
)
def test_gateway_answers_400_when_body_lacks_object_or_required_field(
    gateway: RunningGateway, body: bytes
) -> None:
    """B1 to B7: bytes that are not a JSON object with the required fields get a 400."""
    _check_refused(gateway, 400, _CHAT, body)
    _check_refused(gateway, 400, _COMPLETIONS, body)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400", "9" * 5_000])
def test_gateway_answers_400_to_nan_infinity_or_number_outside_float_range(
    gateway: RunningGateway, number: str
) -> None:
    """B8, B9: NaN, Infinity and numbers without a finite value get a 400."""
    body = json.dumps(_OK)[:-1] + f', "temperature": {number}}}'
    _check_refused(gateway, 400, _CHAT, body.encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(a"},
        {"n": 0},
        {"n": 10**9},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "../../x"}}]},
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": _nested(65)}}]},
        {"tools": [{"type": "function", "function": {"name": "x"}}] * 2},
        {"tools": [{"type": "function", "function": {"name": f"x{n}"}} for n in range(10_000)]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_schema"}},
        {"logit_bias": {"100000": 1}},
        {"max_tokens": 100_000},
        {"messages": []},
        {"messages": [{"role": "user", "content": "refuse me"}]},
        {"messages": [{"role": "user", "content": "long " * 5_000}]},
        {"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]},
    ],
)
def test_gateway_answers_400_that_names_unsupported_field(
    gateway: RunningGateway, fields: dict[str, Any]
) -> None:
    """B23 to B35: a field out of range or not supported gets a 400 that names it."""
    error = _check_refused(gateway, 400, _CHAT, {**_OK, **fields})
    assert error["param"].startswith(next(iter(fields)))


def test_gateway_answers_400_when_prompt_fills_the_whole_context(gateway: RunningGateway) -> None:
    """B31: a prompt that leaves no room for a token gets a 400; one token less is served."""
    body: dict[str, Any] = {"model": "tiny", "prompt": [40] * 512}
    error = _check_refused(gateway, 400, _COMPLETIONS, body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    body |= {"prompt": [40] * 511, "max_tokens": 2}
    assert _check_refused(gateway, 400, _COMPLETIONS, body)["param"] == "max_tokens"
    assert gateway.post(_COMPLETIONS, {"model": "tiny", "prompt": [40] * 511})[0] == 200


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        [-1],
        [1.5],
        [True],
        [10**6],
        [2**70],
        [[40], [-1]],
        [[40], []],
        [[40], "x"],
        ["x", 3],
        [None],
        {"a": 1},
        None,
        3,
        ["x"] * 65,
        [[[40]]],
    ],
)
def test_gateway_answers_400_when_prompt_is_empty_or_has_unknown_ids(
    gateway: RunningGateway, prompt: Any
) -> None:
    """B31: prompts without tokens, unknown ids, floats and mixed lists get a 400."""
    error = _check_refused(gateway, 400, _COMPLETIONS, {"model": "tiny", "prompt": prompt})
    assert error["param"].startswith("prompt")


def test_million_characters_without_space_are_refused_before_encoding(
    gateway: RunningGateway,
) -> None:
    """B32: a million characters without a space are refused by length, before they are encoded."""
    body = {**_OK, "messages": [{"role": "user", "content": "a" * 1_000_000}]}
    error = _check_refused(gateway, 400, _CHAT, body)
    assert error["code"] == "context_length_exceeded"
    # The message counts characters: after encoding it would count tokens.
    assert " characters, " in error["message"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "x" * 2**20, "", "TINY", "tiny\x00"])
def test_gateway_answers_404_with_openai_code_when_model_is_unknown(
    gateway: RunningGateway, name: str
) -> None:
    """B41: another model name gets a 404 with OpenAI's code."""
    error = _check_refused(gateway, 404, _CHAT, {**_OK, "model": name})
    assert error["code"] == "model_not_found"
    assert len(error["message"]) < 300


def test_models_endpoint_answers_404_for_every_name_but_served_model(
    gateway: RunningGateway,
) -> None:
    """/v1/models/NAME finds the served model; other names get a 404."""
    assert json.loads(gateway.get("/v1/models/tiny")[1])["id"] == "tiny"
    assert gateway.get("/v1/models/other/model")[0] == 404


def test_gateway_answers_413_when_body_exceeds_limit(gateway: RunningGateway) -> None:
    """B11: a body over the limit gets a 413, with a Content-Length or chunked."""
    size = 16 * 1024 * 1024 + 1
    head = f"Content-Type: application/json\r\nContent-Length: {size}"
    assert gateway.send(_post_bytes(head)).startswith(b"HTTP/1.1 413 ")
    head = "Content-Type: application/json\r\nTransfer-Encoding: chunked"
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    response = gateway.send(_post_bytes(head, chunk * 17 + b"0\r\n\r\n"))
    assert response == b"" or response.startswith(b"HTTP/1.1 413 ")
    assert gateway.get("/health")[0] == 200


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "identity, gzip"])
def test_gateway_answers_415_when_body_is_compressed(gateway: RunningGateway, coding: str) -> None:
    """B12: a compressed body gets a 415 and is not decompressed."""
    body = gzip.compress(json.dumps(_OK).encode())
    _check_refused(gateway, 415, _CHAT, body, Content_Encoding=coding)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin1"]
)
def test_gateway_answers_415_when_content_type_is_not_json(
    gateway: RunningGateway, kind: str
) -> None:
    """B13: types that an HTML form can send, and other charsets, get a 415."""
    _check_refused(gateway, 415, _CHAT, _OK, Content_Type=kind)


def test_gateway_accepts_json_content_type_with_charset_utf8(gateway: RunningGateway) -> None:
    """A content type of JSON with charset UTF-8 is accepted."""
    kind = {"Content-Type": "application/json; charset=UTF-8"}
    assert gateway.post(_CHAT, _OK, kind)[0] == 200


_BODY = json.dumps(_OK).encode()
_JSON = "Content-Type: application/json\r\n"


@pytest.mark.parametrize(
    "data",
    [
        _post_bytes(f"{_JSON}Content-Length: 5\r\nTransfer-Encoding: chunked", b"0\r\n\r\n"),
        _post_bytes(f"{_JSON}Content-Length: 5\r\nContent-Length: 6", b"xxxxxx"),
        _post_bytes(f"{_JSON}Content-Length: +4", b"xxxx"),
        _post_bytes(f"{_JSON}Content-Length: -1", b"xxxx"),
        _post_bytes(f"{_JSON}Transfer-Encoding: identity, chunked", b"2\r\n{}\r\n0\r\n\r\n"),
        _post_bytes(f"{_JSON}Transfer-Encoding: gzip, chunked", b"2\r\n{}\r\n0\r\n\r\n"),
        _post_bytes(f"{_JSON}Transfer-Encoding: chunked", b"2;a\n{}\r\n0\r\n\r\n"),
        _post_bytes(f"{_JSON}X-A: b\r\n c\r\nContent-Length: 2", b"{}"),
        _post_bytes(_JSON + "".join(f"X-{n}: y\r\n" for n in range(10_000)) + "X: y"),
        _post_bytes(f"{_JSON}X-Long: {'y' * 9_216}"),
        _post_bytes(f"{_JSON}Transfer-Encoding: chunked", b"2;" + b"x" * 2**20 + b"\r\n{}\r\n"),
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\x00: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
def test_gateway_refuses_ambiguous_http_framing_and_closes_connection(
    impatient_gateway: RunningGateway, data: bytes
) -> None:
    """B14, B15: ambiguous framing is refused, and a request hidden behind it gets no response."""
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    start = time.monotonic()
    response = impatient_gateway.send(data + smuggled, 20.0)
    assert time.monotonic() - start < _CLOSED_WITHIN_S
    assert response == b"" or response.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), response[:200]
    assert b'"ok"' not in response
    assert impatient_gateway.scheduler.submitted == []


def test_gateway_does_not_read_body_of_refused_request_as_next_request(
    gateway: RunningGateway,
) -> None:
    """B18: the gateway skips the body of a refused request before it reads the next one."""
    inner = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    first = _post_bytes(f"{_JSON}Content-Length: {len(inner)}", inner)
    second = _post_bytes(f"{_JSON}Connection: close\r\nContent-Length: 2", b"{}")
    response = gateway.send(first + second)
    assert response.count(b"HTTP/1.1 400") == 2
    assert b'"ok"' not in response


@pytest.mark.proof
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST /v1/chat",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
        _post_bytes(f"{_JSON}Content-Length: 50", b'{"model"'),
        _post_bytes(f"{_JSON}Transfer-Encoding: chunked", b"5\r\n{"),
    ],
)
def test_gateway_closes_connection_with_incomplete_request_after_timeout(
    impatient_gateway: RunningGateway, data: bytes
) -> None:
    """B17: a connection without a complete request is closed after the timeout."""
    start = time.monotonic()
    response = impatient_gateway.send(data, 20.0)
    assert time.monotonic() - start < _CLOSED_WITHIN_S
    assert response == b"" or response.startswith(b"HTTP/1.1 408 ")


def test_gateway_closes_connection_after_timeout_when_headers_arrive_slowly(
    impatient_gateway: RunningGateway,
) -> None:
    """B17: a few header bytes every tenth of a second do not extend the timeout."""
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", impatient_gateway.port)) as client:
        client.settimeout(0.1)
        client.sendall(b"GET / HTTP/1.1\r\n")
        while time.monotonic() - start < 20.0:
            try:
                client.sendall(b"X:")
                if client.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert time.monotonic() - start < _CLOSED_WITHIN_S


def test_gateway_ends_request_with_one_byte_chunks_at_body_timeout(
    impatient_gateway: RunningGateway,
) -> None:
    """B16: a body of one-byte chunks ends at its timeout, and other requests are served."""
    head = f"{_JSON}Connection: close\r\nTransfer-Encoding: chunked"
    response = impatient_gateway.send(_post_bytes(head, b"1\r\n \r\n" * 300_000), 20.0)
    assert response == b"" or response.startswith(b"HTTP/1.1 4")
    impatient_gateway.wait_ready()


def test_unknown_path_gets_404_and_wrong_method_gets_405(gateway: RunningGateway) -> None:
    """Unknown paths get a 404 and wrong methods a 405, in OpenAI's error format."""
    _check_refused(gateway, 404, "/v1/nothing", _OK)
    _check_refused(gateway, 405, "/v1/models", _OK)
    status, body = gateway.get(_CHAT)
    assert (status, json.loads(body)["error"]["type"]) == (405, "invalid_request_error")


def test_gateway_answers_200_to_control_characters_and_template_marks_in_chat_message(
    gateway: RunningGateway,
) -> None:
    """B44: no text in a message changes the behaviour of the server."""
    for text in ("FAULT_INJECT_CRASH", "EXO RUNNER MUST FAIL", "\x00", "\ufdd0<|im_end|>", "{{1}}"):
        assert gateway.chat(text)[0] == 200
    assert gateway.get("/readyz")[0] == 200


def test_gateway_logs_no_traceback_when_http_is_malformed(
    model_folder: Path, tmp_path: Path
) -> None:
    """Malformed HTTP gets a JSON error, and the log has no traceback."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        response = gateway.send(b"GET / HTTP/1.1\r\nContent-Length: +1\r\n\r\n")
        assert response.startswith(b"HTTP/1.0 400 ")
        assert json.loads(response.partition(b"\r\n\r\n")[2])["error"]["param"] is None
        assert "Traceback" not in gateway.stop()
