"""Bad values of every kind, sent to one gateway beside a running stream, which never notices."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import finished, generated

_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_TOKENIZER = tiny_tokenizer.train()
_TOKENS: list[int] = _TOKENIZER.encode("one two three " * 100).ids[:400]
_MESSAGE = b'"messages":[{"role":"user","content":"x"}]'
_START = {_CHAT: b'{"model":"tiny",' + _MESSAGE, _TEXT: b'{"model":"tiny","prompt":"x"'}


class Watched:
    """A gateway with a stream that runs while the table is sent."""

    def __init__(self, gateway: RunningGateway) -> None:
        self.gateway = gateway
        self._is_enough = threading.Event()
        self._events: list[Any] = []
        self._sent = 0
        gateway.scheduler.reply = self._reply
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def end(self) -> None:
        """Let the stream end: it has every token, and nothing but its order was submitted."""
        self._is_enough.set()
        self._reader.join(30)
        text = "".join(
            event["choices"][0]["delta"].get("content", "") for event in self._events[:-1]
        )
        assert self._events[-1] == "[DONE]"
        assert text == _TOKENIZER.decode(_TOKENS[: self._sent])
        assert len(self.gateway.scheduler.orders) == 1

    def _read(self) -> None:
        body = {"messages": [{"role": "user", "content": "watched"}]}
        self._events += self.gateway.stream(_CHAT, body)

    def _reply(self, request: Any) -> Iterator[Any]:
        for place, token in enumerate(_TOKENS):
            yield generated(request, place, [token])
            self._sent += 1
            yield 0.05
            if self._is_enough.is_set():
                break
        yield finished(request, self._sent, "stop")


@pytest.fixture(scope="module")
def watched(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A gateway, and a stream from before the first test to after the last."""
    with RunningGateway.start(model_folder, tmp_path_factory.mktemp("run")) as gateway:
        stream = Watched(gateway)
        yield stream
        stream.end()


def _refused(watched: Watched, path: str, body: bytes, param: str | None, status: int = 400) -> str:
    got, answer, _ = watched.gateway.post(path, body)
    assert got == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    message: str = error["message"]
    assert message.endswith(".")
    assert len(message) < 600
    assert "Traceback" not in message
    assert param is None or param.split("[")[0].split(".")[0] in message
    assert watched.gateway.get("/livez")[0] == 200
    return message


_MILLION_BIASES = b'"logit_bias":{' + b",".join(b'"%d":1' % n for n in range(10**6)) + b"}"


def _each(case: str, name: str, *values: str) -> list[tuple[str, bytes, str | None]]:
    return [(case, f'"{name}":{value}'.encode(), name) for value in values]


_BOTH: list[tuple[str, bytes, str | None]] = [
    ("B8", b'"max_tokens":' + b"9" * 5_000, "max_tokens"),
    ("B8", b'"temperature":' + b"9" * 5_000, "temperature"),
    ("B9", b'"temperature":NaN', None),
    ("B9", b'"temperature":-Infinity', None),
    ("B9", b'"top_p":1e400', "top_p"),
    ("B9", b'"min_p":-1e400', "min_p"),
    ("B9", b'"logit_bias":{"1":1e400}', "logit_bias[...]"),
    ("B9", b'"n":1e400', "n"),
    ("B10", b'"n":1,"n":9999', "n"),
    ("B10", b'"seed":1,"seed":"x"', "seed"),
    *_each("B23", "n", "0", "-1", "1000000000", "true", "1.0", '"1"', "[1]"),
    *_each("B24", "max_tokens", "0", "-1", str(2**63), "1.5", "true", '"9"', "513", "1000000"),
    *_each("B25", "temperature", "-1", "1e308", '"hot"', "true", "[]"),
    *_each("B26", "top_p", "0", "-0.1", "1.000001", '"1"'),
    *_each("B26", "top_k", "-5", "1.5", str(2**31)),
    *_each("B26", "min_p", "2", "-1"),
    *_each("B27", "seed", str(2**70), "1.5", "true"),
    *_each("-", "speculation", '"ngram"', "true", "3", "[]"),
    ("-", b'"speculation":{"method":"magic"}', "speculation.method"),
    ("-", b'"speculation":{"method":"eagle"}', "speculation.method"),
    ("-", b'"speculation":{"tokens":17}', "speculation.tokens"),
    ("-", b'"speculation":{"tokens":-1}', "speculation.tokens"),
    ("-", b'"speculation":{"model":"x"}', "speculation.model"),
    ("B28", b'"logprobs":1000000', "logprobs"),
    ("B29", b'"stop":[' + b",".join([b'"x"'] * 10_000) + b"]", "stop"),
    ("B29", b'"stop":""', "stop"),
    ("B29", b'"stop":["x",""]', "stop[1]"),
    ("B29", b'"stop":"' + b"x" * 2**20 + b'"', "stop"),
    ("B29", b'"stop":"' + b"\xef\xbf\xbf" * 65_535 + b'"', "stop"),
    ("B29", b'"stop":{"a":"b"}', "stop"),
    ("B29", b'"stop":[["x"]]', "stop[0]"),
    ("B30", b'"logit_bias":{"-1":1}', "logit_bias"),
    ("B30", b'"logit_bias":{"100000":1}', "logit_bias"),
    ("B30", b'"logit_bias":{"1.5":1}', "logit_bias"),
    ("B30", b'"logit_bias":{"' + b"9" * 5_000 + b'":1}', "logit_bias"),
    ("B30", _MILLION_BIASES, None),
    ("B30", b'"logit_bias":{"1":101}', "logit_bias[...]"),
    ("B30", b'"logit_bias":[[1,1]]', "logit_bias"),
    ("B36", b'"guided_regex":"(a+)+b"', "guided_regex"),
    ("B36", b'"regex":"foo**"', "regex"),
    ("B37", b'"guided_json":{"$ref":"http://127.0.0.1/"}', "guided_json"),
    ("B38", b'"guided_grammar":"root ::= root"', "guided_grammar"),
    ("B42", b'"cache_salt":5', "cache_salt"),
    ("B42", b'"cache_salt":"' + b"x" * 2**20 + b'"', "cache_salt"),
    ("B42", b'"cache_salt":"\\ud800"', None),
    ("-", b'"stream":"yes"', "stream"),
    ("-", b'"stream_options":{}', "stream_options"),
    ("-", b'"stream":true,"stream_options":{"include_usage":1}', "stream_options.include_usage"),
    ("-", b'"user":"' + b"x" * 2_000 + b'"', "user"),
    ("-", b'"metadata":{' + b",".join(b'"%d":"x"' % n for n in range(17)) + b"}", "metadata"),
    ("-", b'"service_tier":"priority"', "service_tier"),
    ("-", b'"' + b"x" * 2**20 + b'":1', "x" * 100),
    ("-", b'"\xc3\xa9\\n\\u0000":1', "\u00e9\n\x00"),
]  # fmt: skip


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
@pytest.mark.parametrize(("case", "fields", "param"), _BOTH, ids=lambda value: str(value)[:24])
def test_fields_of_both_endpoints(
    watched: Watched, case: str, fields: bytes, param: str | None, path: str
) -> None:
    """B8 to B10, B23 to B30, B36 to B38, B42: refused by name, whatever the value."""
    _refused(watched, path, _START[path] + b"," + fields + b"}", param)


def _schema(**inner: Any) -> bytes:
    fields = {"type": "json_schema", "json_schema": {"name": "x", "schema": inner}}
    return b'"response_format":' + json.dumps(fields).encode()


def _tool(**fields: Any) -> bytes:
    tool = {"type": "function", "function": {"name": "f", **fields}}
    return b'"tools":' + json.dumps([tool]).encode()


def _deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


_KWARGS = "chat_template_kwargs"
_OF_CHATS: list[tuple[str, bytes, str | None]] = [
    ("B5", _tool(parameters=_deep(66)), "tools[0].function.parameters"),
    ("B24", b'"max_completion_tokens":513', "max_completion_tokens"),
    ("B28", b'"logprobs":true,"top_logprobs":1000000', "top_logprobs"),
    ("B28", b'"logprobs":true,"top_logprobs":129', "top_logprobs"),
    ("B28", b'"logprobs":true,"top_logprobs":-1', "top_logprobs"),
    ("B35", b'"chat_template":"{{ 1 }}"', "chat_template"),
    *(("B35", b'"%b":{"%b":"x"}' % (_KWARGS.encode(), name.encode()), f"{_KWARGS}.{name}")
      for name in ("tokenize", "__class__", "messages", "tools", "enable_thinking")),
    ("B35", b'"chat_template_kwargs":[]', _KWARGS),
    ("B37", _schema(**{"$ref": "#"}), "response_format.json_schema"),
    ("B37", _schema(**{"$ref": "http://127.0.0.1:1/"}), "response_format.json_schema"),
    ("B37", _schema(anyOf=[{"const": n} for n in range(10_000)]), "response_format.json_schema"),
    ("B37", _schema(description="x" * 2**20), "response_format.json_schema"),
    ("B37", b'"response_format":{"type":"json_object"}', "response_format"),
    ("B37", b'"response_format":"json"', "response_format"),
    ("B40", _tool(name="../../x"), "tools[0].function.name"),
    ("B40", _tool(name=""), "tools[0].function.name"),
    ("B40", _tool(name="x" * 65), "tools[0].function.name"),
    ("B40", _tool(name="\u00e9"), "tools[0].function.name"),
    ("B40", b'"tools":[' + b",".join([b"{}"] * 10**6) + b"]", None),
    ("B40", b'"tools":[{"type":"code"}]', "tools[0].type"),
    ("B40", b'"tool_choice":{"type":"function","function":{"name":"f"}}', "tool_choice"),
    ("B40", b'"tool_choice":"required"', "tool_choice"),
    ("-", b'"functions":[]', "functions"),
    ("-", b'"prediction":{}', "prediction"),
    ("-", b'"messages":[]', "messages"),
    ("-", b'"messages":{}', "messages"),
    ("-", b'"messages":"x"', "messages"),
    ("-", b'"messages":[[]]', "messages[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "fields", "param"), _OF_CHATS, ids=lambda value: str(value)[:24])
def test_fields_of_chats(watched: Watched, case: str, fields: bytes, param: str | None) -> None:
    """B5, B28, B35, B37, B40: templates, schemas and tools; nothing of them is compiled or run."""
    _refused(watched, _CHAT, _START[_CHAT] + b"," + fields + b"}", param)


_PART = b'{"type":"text","text":""}'
_MESSAGES: list[tuple[bytes, str]] = [
    (b'{"role":"bob","content":"x"}', "role"),
    (b'{"role":1,"content":"x"}', "role"),
    (b'{"content":"x"}', "role"),
    (b'{"role":"user","content":null}', "content"),
    (b'{"role":"user","content":7}', "content"),
    (b'{"role":"user","content":[]}', "content"),
    (b'{"role":"user","content":[[{"type":"text","text":"x"}]]}', "content[0]"),
    (b'{"role":"user","content":[{"text":"x"}]}', "content[0].type"),
    (b'{"role":"user","content":[{"type":"text","text":null}]}', "content[0].text"),
    (b'{"role":"user","content":[' + b",".join([_PART] * 2_000) + b"]}", "content"),
    (b'{"role":"tool","content":"x"}', "tool_call_id"),
    (b'{"role":"tool","content":"x","tool_call_id":"no-such-call"}', "tool_call_id"),
    (b'{"role":"assistant"}', "content"),
    (b'{"role":"assistant","tool_calls":[{"id":"a"}]}', "tool_calls[0].function"),
    (b'{"role":"user","content":"x","name":"' + b"x" * 257 + b'"}', "name"),
    (b'{"role":"user","content":"x","__class__":"x"}', "__class__"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "param"), _MESSAGES, ids=lambda value: str(value)[:40])
def test_messages(watched: Watched, message: bytes, param: str) -> None:
    """B34: unknown roles, content that is none, nested parts, an answer to no call."""
    body = b'{"model":"tiny","messages":[{"role":"user","content":"x"},' + message + b"]}"
    _refused(watched, _CHAT, body, f"messages[1].{param}")


def test_very_many_messages(watched: Watched) -> None:
    """B34: ten thousand messages are too many; as many as are allowed are too long here."""
    one = b'{"role":"user","content":"x"}'
    for count in (10_000, 4_096):
        body = b'{"model":"tiny","messages":[' + b",".join([one] * count) + b"]}"
        _refused(watched, _CHAT, body, "messages")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"\x00", None),
        (b"x", None),
        (b"[]", None),
        (b"3", None),
        (b"null", None),
        (b"[" * 100_000, None),
        (b'{"a":' * 100_000, None),
        (b'{"a":' * 40_000, "a"),
        (b'{"model":' + b"[" * 90_000, "model"),
        (b'{"model":"\xff"}', None),
        (b'{"model":"\xc0\xaf"}', None),
        (b'{"model":"\xed\xa0\x80"}', None),
        (b'{"model":"\\ud800"}', None),
        (b'{"model":"\\ud800\\ud800"}', None),
        (b"\xff\xfe{\x00}\x00", None),
        (b"{}", "model"),
        (b'{"model":"tiny"', None),
        (b"{'model':'tiny'}", None),
        (b'{"model":"tiny",}', None),
        (b'{"model":"ti\nny"}', None),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bodies(watched: Watched, body: bytes, param: str | None) -> None:
    """B1 to B4, B6, B7: what is no JSON object, whatever its bytes."""
    _refused(watched, _CHAT, body, param)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "x" * 2**20, "", "other", "tiny/../tiny", "\x00"]
)
def test_models(watched: Watched, name: str) -> None:
    """B41: a name is compared, never opened."""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "x"}]}).encode()
    _refused(watched, _CHAT, body, "model", 404)


def test_pictures_are_not_fetched(watched: Watched) -> None:
    """B43: refused as not supported, and nobody connects to where they point."""
    with socket.socket() as bait:
        bait.bind(("127.0.0.1", 0))
        bait.listen()
        bait.settimeout(0.2)
        here = f"127.0.0.1:{bait.getsockname()[1]}"
        for url in (f"http://{here}/x.png", f"http://{here}@{here}/", "file:///etc/passwd",
                    "http://169.254.169.254/latest", "data:image/png;base64,AAAA"):  # fmt: skip
            for kind in ("image_url", "input_audio", "file"):
                part = {"type": kind, kind: {"url": url}}
                body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
                param = "messages[0].content[0].type"
                message = _refused(watched, _CHAT, json.dumps(body).encode(), param)
                assert kind in message
                assert "only text is supported" in message
        with pytest.raises(TimeoutError):
            bait.accept()


def test_ten_thousand_schemas_leave_nothing(watched: Watched) -> None:
    """B39: a stream of different schemas is refused one by one; there is no cache to fill."""
    for number in range(300):
        body = _START[_CHAT] + b"," + _schema(const=number) + b"}"
        assert watched.gateway.post(_CHAT, body)[0] == 400
    assert watched.gateway.get("/readyz")[0] == 200
