"""Promise 20: invalid requests of every kind do not slow down a running stream."""

import contextlib
import json
import time
from pathlib import Path

import pytest

from tests.gateway import raw_client
from tests.gateway.invalid_requests.background_stream import BackgroundStream
from tests.gateway.running_gateway import RunningGateway

_TOKEN_S = 0.02
_OK = b'"model":"tiny","messages":[{"role":"user","content":"x"}]'
_JSON = b"Content-Type: application/json\r\n"


def _chat(fields: bytes) -> bytes:
    return b"{" + _OK + b"," + fields + b"}"


def _http(head: bytes, body: bytes = b"") -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n" + body


_MANY = b",".join
BODIES: dict[str, bytes] = {
    "B1 empty": b"",
    "B2 no JSON": b"x" * 2**20,
    "B3 array": b"[1]",
    "B4 deep": b"[" * 100_000,
    "B4 deep objects": b'{"a":' * 40_000,
    "B4 deep, unknown place": _chat(b'"tools":' + b"[" * 60_000),
    "B5 deep parameters": _chat(
        b'"tools":[{"type":"function","function":{"name":"f","parameters":'
        + b'{"a":' * 65 + b"{}" + b"}" * 65 + b"}}]"
    ),
    "B6 no UTF-8": b'{"model":"\xff"}',
    "B7 half a surrogate pair": b'{"model":"\\ud800"}',
    "B8 long integer": _chat(b'"seed":' + b"9" * 5_000),
    "B9 NaN": _chat(b'"temperature":NaN'),
    "B10 twice": _chat(b'"n":1,"n":9999'),
    "B23 n": _chat(b'"n":1000000000'),
    "B24 max_tokens": _chat(b'"max_tokens":9223372036854775808'),
    "B25 temperature": _chat(b'"temperature":1e308'),
    "B26 top_p": _chat(b'"top_p":-1'),
    "B27 seed": _chat(b'"seed":1180591620717411303424'),
    "B28 logprobs": _chat(b'"logprobs":true,"top_logprobs":1000000'),
    "B29 stops": _chat(b'"stop":[' + _MANY([b'"x"'] * 10_000) + b"]"),
    "B29 long stop": _chat(b'"stop":"' + b"x" * 2**20 + b'"'),
    "B30 biases": _chat(b'"logit_bias":{' + _MANY(b'"%d":1' % n for n in range(10**6)) + b"}"),
    "B31 too many ids": b'{"model":"tiny","prompt":[' + _MANY([b"1"] * 2_000_000) + b"]}",
    "B31 lists": b'{"model":"tiny","prompt":[' + _MANY([b"[]"] * 1_300_000) + b"]}",
    "B31 lists of one": b'{"model":"tiny","prompt":[' + _MANY([b"[1]"] * 1_000_000) + b"]}",
    "B32 one long word": _chat(b'"stop":"x"').replace(b'"x"}]', b'"' + b"a" * 10**6 + b'"}]'),
    "B34 messages": b'{"model":"tiny","messages":['
    + _MANY([b'{"role":"user","content":"x"}'] * 10_000) + b"]}",
    "B34 role": b'{"model":"tiny","messages":[{"role":"bob","content":"x"}]}',
    "B35 template": _chat(b'"chat_template":"{{ 1 }}"'),
    "B36 regex": _chat(b'"guided_regex":"(a+)+(?=b)"'),
    "B37 schema": _chat(b'"guided_json":{"$ref":"http://127.0.0.1:1/"}'),
    "B38 grammar": _chat(b'"guided_grammar":"root ::= root"'),
    "B40 tools": _chat(b'"tools":[' + _MANY([b"{}"] * 10**6) + b"]"),
    "B41 model": b'{"model":"' + b"x" * 2**20 + b'","messages":[{"role":"user","content":"x"}]}',
    "B42 salt": _chat(b'"cache_salt":"' + b"x" * 2**20 + b'"'),
    "B43 picture": b'{"model":"tiny","messages":[{"role":"user","content":'
    b'[{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/"}}]}]}',
}  # fmt: skip
"""Bodies that get a 4xx before they reach the scheduler; B33 and B44 would be served."""

HTTP: dict[str, bytes] = {
    "B11 too large": _http(_JSON + b"Content-Length: 999999999"),
    "B12 compressed": _http(_JSON + b"Content-Encoding: gzip\r\nContent-Length: 2", b"{}"),
    "B13 form": _http(b"Content-Type: text/plain\r\nContent-Length: 2", b"{}"),
    "B14 both lengths": _http(_JSON + b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"0\r\n"),
    "B14 two lengths": _http(_JSON + b"Content-Length: 5\r\nContent-Length: 6", b"xxxxxx"),
    "B14 identity": _http(_JSON + b"Transfer-Encoding: identity, chunked", b"2\r\n{}\r\n0\r\n\r\n"),
    "B15 headers": _http(_JSON + b"".join(b"X-%d: y\r\n" % n for n in range(10_000)) + b"X: y"),
    "B15 long header": _http(_JSON + b"X: " + b"y" * 9_216),
    "B15 extension": _http(_JSON + b"Transfer-Encoding: chunked", b"2;" + b"x" * 2**20),
    "B16 single bytes": _http(_JSON + b"Transfer-Encoding: chunked", b"1\r\n \r\n" * 100_000),
    "B17 half": _http(_JSON + b"Content-Length: 50", b"{"),
    "B18 pipelined": _http(_JSON + b"Content-Length: 2", b"{}") * 50,
    "B19 host": b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "B20 origin": _http(b"Origin: https://evil.example\r\n" + _JSON + b"Content-Length: 2", b"{}"),
    "B21 bearer": _http(b"Authorization: Bearer k\xe9y\r\n" + _JSON + b"Content-Length: 2", b"{}"),
    "B22 key in the query": b"GET /v1/models/x?api_key=x HTTP/1.1\r\nHost: localhost\r\n\r\n",
}
"""Requests that get a 4xx, or whose connection is closed without a response."""


@pytest.mark.alone
def test_token_gaps_of_running_stream_stay_short_while_invalid_requests_arrive(
    model_folder: Path, tmp_path: Path
) -> None:
    """Every invalid request gets a 4xx, and the stream's p99 gap stays in bounds."""
    with RunningGateway.start(model_folder, tmp_path, body_timeout_s=1.0) as gateway:
        stream = BackgroundStream(gateway, _TOKEN_S)
        with contextlib.ExitStack() as ending:
            ending.callback(stream.end)
            idle_s = stream.p99_s(lambda: time.sleep(4.0))
            busy_s = stream.p99_s(lambda: _send_all(gateway))
        # The bound is loose for busy test machines; it limits the cost of one invalid request.
        assert busy_s < 2 * idle_s + 0.1, (idle_s, busy_s)


def _send_all(gateway: RunningGateway) -> None:
    for case, body in BODIES.items():
        path = "/v1/completions" if b'"prompt"' in body[:40] else raw_client.CHAT
        status, error_body, _ = gateway.post(path, body)
        assert 400 <= status < 500, (case, status)
        assert set(error_body["error"]) == {"message", "type", "param", "code"}, case
    for case, data in HTTP.items():
        response = gateway.send(data, 0.5)
        assert response == b"" or response.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), case
    assert json.loads(gateway.get("/health")[1]) == {"status": "ok"}
