"""Promise 20: everything that is bad at once, beside a stream whose tokens come as before."""

import contextlib
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway import raw_client, tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import finished, generated

_TOKENIZER = tiny_tokenizer.train()
_TOKENS: list[int] = (_TOKENIZER.encode("one two three " * 100).ids * 10)[:4_000]
_TOKEN_S = 0.02
_OK = b'"model":"tiny","messages":[{"role":"user","content":"x"}]'
_JSON = b"Content-Type: application/json\r\n"


def _chat(fields: bytes) -> bytes:
    return b"{" + _OK + b"," + fields + b"}"


def _raw(head: bytes, body: bytes = b"") -> bytes:
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
    "B26 top_p": _chat(b'"top_p":0'),
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
    "B36 regex": _chat(b'"guided_regex":"(a+)+b"'),
    "B37 schema": _chat(b'"response_format":{"type":"json_schema","json_schema":{"$ref":"#"}}'),
    "B38 grammar": _chat(b'"guided_grammar":"root ::= root"'),
    "B40 tools": _chat(b'"tools":[' + _MANY([b"{}"] * 10**6) + b"]"),
    "B41 model": b'{"model":"' + b"x" * 2**20 + b'","messages":[{"role":"user","content":"x"}]}',
    "B42 salt": _chat(b'"cache_salt":"' + b"x" * 2**20 + b'"'),
    "B43 picture": b'{"model":"tiny","messages":[{"role":"user","content":'
    b'[{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/"}}]}]}',
}  # fmt: skip
"""Each is refused with a 4xx before it reaches the scheduler; B33 and B44 are served."""

HTTP: dict[str, bytes] = {
    "B11 too large": _raw(_JSON + b"Content-Length: 999999999"),
    "B12 compressed": _raw(_JSON + b"Content-Encoding: gzip\r\nContent-Length: 2", b"{}"),
    "B13 form": _raw(b"Content-Type: text/plain\r\nContent-Length: 2", b"{}"),
    "B14 both lengths": _raw(_JSON + b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"0\r\n"),
    "B14 two lengths": _raw(_JSON + b"Content-Length: 5\r\nContent-Length: 6", b"xxxxxx"),
    "B14 identity": _raw(_JSON + b"Transfer-Encoding: identity, chunked", b"2\r\n{}\r\n0\r\n\r\n"),
    "B15 headers": _raw(_JSON + b"".join(b"X-%d: y\r\n" % n for n in range(10_000)) + b"X: y"),
    "B15 long header": _raw(_JSON + b"X: " + b"y" * 9_216),
    "B15 extension": _raw(_JSON + b"Transfer-Encoding: chunked", b"2;" + b"x" * 2**20),
    "B16 single bytes": _raw(_JSON + b"Transfer-Encoding: chunked", b"1\r\n \r\n" * 100_000),
    "B17 half": _raw(_JSON + b"Content-Length: 50", b"{"),
    "B18 pipelined": _raw(_JSON + b"Content-Length: 2", b"{}") * 50,
    "B19 host": b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "B20 origin": _raw(b"Origin: https://evil.example\r\n" + _JSON + b"Content-Length: 2", b"{}"),
    "B21 bearer": _raw(b"Authorization: Bearer k\xe9y\r\n" + _JSON + b"Content-Length: 2", b"{}"),
    "B22 key in the query": b"GET /v1/models/x?api_key=x HTTP/1.1\r\nHost: localhost\r\n\r\n",
}
"""Each is refused with a 4xx, or closed without a word."""


class _Stream:
    """A stream that runs until it is told that it is enough, and when each of its pieces came."""

    def __init__(self, gateway: RunningGateway) -> None:
        self._gateway = gateway
        self._is_enough = threading.Event()
        self._sent = 0
        self._events: list[Any] = []
        self.times_s: list[float] = []
        gateway.scheduler.reply = self._reply
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def p99_s(self, do: Callable[[], None]) -> float:
        """Return the 99th percentile of the times between two pieces while something is done."""
        begin = len(self.times_s)
        do()
        times_s = self.times_s[begin:]
        gaps = [after - before for before, after in itertools.pairwise(times_s)]
        return statistics.quantiles(gaps, n=100)[98]

    def end(self) -> None:
        """Let it end, and check that it has every token once."""
        self._is_enough.set()
        self._thread.join(30)
        text = "".join(
            event["choices"][0]["delta"].get("content") or "" for event in self._events[:-1]
        )
        assert self._events[-1] == "[DONE]"
        assert text == _TOKENIZER.decode(_TOKENS[: self._sent])

    def _read(self) -> None:
        body = {"messages": [{"role": "user", "content": "watched"}]}
        for event in self._gateway.events(raw_client.CHAT, body):
            self.times_s.append(time.monotonic())
            self._events.append(event)

    def _reply(self, request: Any) -> Iterator[Any]:
        for place, token in enumerate(_TOKENS):
            yield generated(request, place, [token])
            self._sent += 1
            yield _TOKEN_S
            if self._is_enough.is_set():
                break
        yield finished(request, self._sent, "stop")


@pytest.mark.alone
def test_nothing_bad_slows_a_stream_down(model_folder: Path, tmp_path: Path) -> None:
    """All of the list, one after the other: 4xx each, and the stream's p99 stays within bounds."""
    with RunningGateway.start(model_folder, tmp_path, body_timeout_s=1.0) as gateway:
        stream = _Stream(gateway)
        with contextlib.ExitStack() as ending:
            ending.callback(stream.end)
            calm_s = stream.p99_s(lambda: time.sleep(4.0))
            busy_s = stream.p99_s(lambda: _send_all(gateway))
        assert len(gateway.scheduler.orders) == 1
        # A test machine has two busy cores; what one bad request may cost is the point here.
        assert busy_s < 2 * calm_s + 0.1, (calm_s, busy_s)


def _send_all(gateway: RunningGateway) -> None:
    for case, body in BODIES.items():
        path = "/v1/completions" if b'"prompt"' in body[:40] else raw_client.CHAT
        status, answer, _ = gateway.post(path, body)
        assert 400 <= status < 500, (case, status)
        assert set(answer["error"]) == {"message", "type", "param", "code"}, case
    for case, data in HTTP.items():
        answer_bytes = gateway.send(data, 0.5)
        assert answer_bytes == b"" or answer_bytes.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), case
    assert json.loads(gateway.get("/health")[1]) == {"status": "ok"}
