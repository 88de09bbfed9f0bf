"""Invalid values of every field, sent to one gateway beside a running stream."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.invalid_requests.background_stream import BackgroundStream
from tests.gateway.running_gateway import RunningGateway

_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_MESSAGE = b'"messages":[{"role":"user","content":"x"}]'
_START = {_CHAT: b'{"model":"tiny",' + _MESSAGE, _TEXT: b'{"model":"tiny","prompt":"x"'}


@pytest.fixture(scope="module")
def background_stream(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BackgroundStream]:
    """A gateway with a stream that starts before the first test and ends after the last."""
    with RunningGateway.start(model_folder, tmp_path_factory.mktemp("run")) as gateway:
        stream = BackgroundStream(gateway, 0.05)
        yield stream
        stream.end()


def _check_refused(
    background_stream: BackgroundStream,
    path: str,
    body: bytes,
    param: str | None,
    status: int = 400,
) -> str:
    status_code, response, _ = background_stream.gateway.post(path, body)
    assert status_code == status, response
    error = response["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    message: str = error["message"]
    assert message.endswith(".")
    assert len(message) < 600
    assert "Traceback" not in message
    assert param is None or param.split("[")[0].split(".")[0] in message
    assert background_stream.gateway.get("/livez")[0] == 200
    return message


_MILLION_BIASES = b'"logit_bias":{' + b",".join(b'"%d":1' % n for n in range(10**6)) + b"}"


def _cases(case: str, name: str, *values: str) -> list[tuple[str, bytes, str | None]]:
    return [(case, f'"{name}":{value}'.encode(), name) for value in values]


_COMMON_FIELDS: list[tuple[str, bytes, str | None]] = [
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
    *_cases("B23", "n", "0", "-1", "1000000000", "true", "1.0", '"1"', "[1]"),
    *_cases("B24", "max_tokens", "0", "-2", str(2**63), "1.5", "true", '"9"', "513", "1000000"),
    *_cases("B25", "temperature", "-1", "1e308", '"hot"', "true", "[]"),
    *_cases("B26", "top_p", "-0.1", "1.000001", '"1"'),
    *_cases("B26", "top_k", "-5", "1.5", str(2**31)),
    *_cases("B26", "min_p", "2", "-1"),
    *_cases("B27", "seed", str(2**70), "1.5", "true"),
    *_cases("-", "speculation", '"ngram"', "true", "3", "[]"),
    ("-", b'"speculation":{"method":"magic"}', "speculation.method"),
    ("-", b'"speculation":{"method":"eagle"}', "speculation.method"),
    ("-", b'"speculation":{"tokens":17}', "speculation.tokens"),
    ("-", b'"speculation":{"tokens":-1}', "speculation.tokens"),
    ("B28", b'"logprobs":1000000', "logprobs"),
    ("B29", b'"stop":[' + b",".join([b'"x"'] * 10_000) + b"]", "stop"),
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
    ("B36", b'"guided_regex":"(a+)+(?=b)"', "guided_regex"),
    ("B36", b'"regex":"foo**"', "regex"),
    ("B37", b'"guided_json":{"$ref":"http://127.0.0.1/"}', "guided_json"),
    ("B38", b'"guided_grammar":"root ::= root"', "guided_grammar"),
    ("B42", b'"cache_salt":5', "cache_salt"),
    ("B42", b'"cache_salt":"' + b"x" * 2**20 + b'"', "cache_salt"),
    ("B42", b'"cache_salt":"\\ud800"', None),
    ("-", b'"stream":"yes"', "stream"),
    ("-", b'"service_tier":1', "service_tier"),
    ("-", b'"stream":true,"stream_options":{"include_usage":1}', "stream_options.include_usage"),
]  # fmt: skip


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
@pytest.mark.parametrize(
    ("case", "fields", "param"), _COMMON_FIELDS, ids=lambda value: str(value)[:24]
)
def test_gateway_answers_400_that_names_invalid_chat_or_completion_field(
    background_stream: BackgroundStream, case: str, fields: bytes, param: str | None, path: str
) -> None:
    """B8 to B10, B23 to B30, B36 to B38, B42: a 400 names the field."""
    _check_refused(background_stream, path, _START[path] + b"," + fields + b"}", param)


def _schema(**inner: Any) -> bytes:
    fields = {"type": "json_schema", "json_schema": {"name": "x", "schema": inner}}
    return b'"response_format":' + json.dumps(fields).encode()


def _tool(**fields: Any) -> bytes:
    tool = {"type": "function", "function": {"name": "f", **fields}}
    return b'"tools":' + json.dumps([tool]).encode()


def _nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


_KWARGS = "chat_template_kwargs"
_CHAT_FIELDS: list[tuple[str, bytes, str | None]] = [
    ("B5", _tool(parameters=_nested(66)), "tools[0].function.parameters"),
    ("B24", b'"max_completion_tokens":513', "max_completion_tokens"),
    ("B28", b'"logprobs":true,"top_logprobs":1000000', "top_logprobs"),
    ("B28", b'"logprobs":true,"top_logprobs":129', "top_logprobs"),
    ("B28", b'"logprobs":true,"top_logprobs":-1', "top_logprobs"),
    ("B35", b'"chat_template":"{{ 1 }}"', "chat_template"),
    *(("B35", b'"%b":{"%b":"x"}' % (_KWARGS.encode(), name.encode()), f"{_KWARGS}.{name}")
      for name in ("tokenize", "__class__", "messages", "tools", "enable_thinking")),
    ("B35", b'"chat_template_kwargs":[]', _KWARGS),
    ("B37", _schema(**{"$ref": "http://127.0.0.1:1/"}), "response_format.json_schema.schema"),
    ("B37", _schema(description="x" * 2**20), "response_format.json_schema.schema"),
    ("B37", b'"response_format":"json"', "response_format"),
    ("B40", _tool(name="../../x"), "tools[0].function.name"),
    ("B40", _tool(name=""), "tools[0].function.name"),
    ("B40", _tool(name="x" * 65), "tools[0].function.name"),
    ("B40", _tool(name="\u00e9"), "tools[0].function.name"),
    ("B40", b'"tools":[' + b",".join([b"{}"] * 10**6) + b"]", None),
    ("B40", b'"tools":[{"type":"code"}]', "tools[0].type"),
    ("B40", b'"tool_choice":{"type":"function","function":{"name":"f"}}', "tool_choice"),
    ("B40", b'"tool_choice":"required"', "tool_choice"),
    ("-", b'"functions":[{}]', "functions"),
    ("-", b'"messages":[]', "messages"),
    ("-", b'"messages":{}', "messages"),
    ("-", b'"messages":"x"', "messages"),
    ("-", b'"messages":[[]]', "messages[0]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "fields", "param"), _CHAT_FIELDS, ids=lambda value: str(value)[:24]
)
def test_gateway_answers_400_that_names_invalid_chat_field(
    background_stream: BackgroundStream, case: str, fields: bytes, param: str | None
) -> None:
    """B5, B28, B35, B37, B40: templates, schemas and tools are refused and never compiled."""
    _check_refused(background_stream, _CHAT, _START[_CHAT] + b"," + fields + b"}", param)


_PART = b'{"type":"text","text":""}'
_MESSAGES: list[tuple[bytes, str]] = [
    (b'{"role":"bob","content":"x"}', "role"),
    (b'{"role":1,"content":"x"}', "role"),
    (b'{"content":"x"}', "role"),
    (b'{"role":"user","content":null}', "content"),
    (b'{"role":"user","content":7}', "content"),
    (b'{"role":"user","content":[[{"type":"text","text":"x"}]]}', "content[0]"),
    (b'{"role":"user","content":[{"text":"x"}]}', "content[0].type"),
    (b'{"role":"user","content":[{"type":"text","text":null}]}', "content[0].text"),
    (b'{"role":"user","content":[' + b",".join([_PART] * 2_000) + b"]}", "content"),
    (b'{"role":"tool","content":"x"}', "tool_call_id"),
    (b'{"role":"tool","content":"x","tool_call_id":"no-such-call"}', "tool_call_id"),
    (b'{"role":"assistant","tool_calls":[{"id":"a"}]}', "tool_calls[0].function"),
    (b'{"role":"user","content":"x","name":"' + b"x" * 257 + b'"}', "name"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "param"), _MESSAGES, ids=lambda value: str(value)[:40])
def test_gateway_answers_400_that_names_index_of_invalid_message(
    background_stream: BackgroundStream, message: bytes, param: str
) -> None:
    """B34: unknown roles, missing or nested content and unmatched tool results get a 400."""
    body = b'{"model":"tiny","messages":[{"role":"user","content":"x"},' + message + b"]}"
    _check_refused(background_stream, _CHAT, body, f"messages[1].{param}")


def test_gateway_answers_400_when_request_has_too_many_messages(
    background_stream: BackgroundStream,
) -> None:
    """B34: 10,000 messages are too many; 4,096 are too long for the context."""
    one = b'{"role":"user","content":"x"}'
    for count in (10_000, 4_096):
        body = b'{"model":"tiny","messages":[' + b",".join([one] * count) + b"]}"
        _check_refused(background_stream, _CHAT, body, "messages")


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
        (b'{"a":' * 40_000, None),
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
def test_gateway_answers_400_when_body_is_no_json_object(
    background_stream: BackgroundStream, body: bytes, param: str | None
) -> None:
    """B1 to B4, B6, B7: a body that is not a JSON object in UTF-8 gets a 400."""
    _check_refused(background_stream, _CHAT, body, param)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "x" * 2**20, "", "other", "tiny/../tiny", "\x00"]
)
def test_gateway_answers_404_when_model_name_is_not_the_served_one(
    background_stream: BackgroundStream, name: str
) -> None:
    """B41: a model name is compared with the served name and never opened as a path."""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "x"}]}).encode()
    _check_refused(background_stream, _CHAT, body, "model", 404)


def test_gateway_answers_400_to_media_parts_and_fetches_no_url(
    background_stream: BackgroundStream,
) -> None:
    """B43: images, audio and files get a 400, and the gateway opens no connection to the URL."""
    with socket.socket() as target:
        target.bind(("127.0.0.1", 0))
        target.listen()
        target.settimeout(0.2)
        address = f"127.0.0.1:{target.getsockname()[1]}"
        for url in (f"http://{address}/x.png", f"http://{address}@{address}/", "file:///etc/passwd",
                    "http://169.254.169.254/latest", "data:image/png;base64,AAAA"):  # fmt: skip
            for kind in ("image_url", "input_audio", "file"):
                part = {"type": kind, kind: {"url": url}}
                body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
                param = "messages[0].content[0].type"
                message = _check_refused(background_stream, _CHAT, json.dumps(body).encode(), param)
                assert kind in message
                assert "only text is supported" in message
        with pytest.raises(TimeoutError):
            target.accept()


def test_gateway_answers_400_to_each_of_300_different_response_schemas(
    background_stream: BackgroundStream,
) -> None:
    """B39: each schema is refused by itself, so a stream of different schemas fills no cache."""
    for number in range(300):
        body = _START[_CHAT] + b"," + _schema(const=number, **{"not": {}}) + b"}"
        assert background_stream.gateway.post(_CHAT, body)[0] == 400
    assert background_stream.gateway.get("/readyz")[0] == 200
