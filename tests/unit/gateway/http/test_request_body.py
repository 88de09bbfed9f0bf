"""Invalid request bodies: always a 400 that names the field."""

import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.dialects.openai.chat import read_messages
from services.gateway.dialects.openai.request_types import ChatCompletionRequest, CompletionRequest
from services.gateway.dialects.openai.validation import check_chat, check_completion
from services.gateway.endpoints.request_options import mix_seed
from services.gateway.http import request_body
from services.gateway.http.errors import ApiError
from shared.configuration.settings import Config
from tests.support.effort import cases

_chat = msgspec.json.Decoder(ChatCompletionRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_START = b'{"model":"m","messages":[{"role":"user","content":"x"}]'


def _refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check_chat(request_body.decode(_chat, body), Config())
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n",
        b"hello",
        b"[]",
        b"3",
        b"null",
        b'"text"',
        b"{",
        b'{"model":"m"}',
        b"[" * 100_000,
        b'{"model":"\xff"}',
        b'{"model":"\xed\xa0\x80"}',
        b'{"model":"\\ud800"}',
        b'{"model":"\\udc00x"}',
        b"\xef\xbb\xbf{}",
        _START + b"} trailing",
        _START + b',"tools":' + b"[" * 100_000,
        _START + b',"tools":[{"a":' + b'{"a":' * 5_000,
    ],
)
def test_request_is_refused_with_400_when_body_is_no_valid_json_request(body: bytes) -> None:
    """B1 to B4, B6, B7: no JSON, no object, no UTF-8, half a surrogate pair, deep nesting."""
    assert _refused(body).message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"n":0', "n"),
        (b'"n":-1', "n"),
        (b'"n":1000000000', "n"),
        (b'"n":9', "n"),
        (b'"n":true', "n"),
        (b'"n":1.0', "n"),
        (b'"n":"1"', "n"),
        (b'"max_tokens":0', "max_tokens"),
        (b'"max_tokens":-2', "max_tokens"),
        (b'"max_tokens":9223372036854775808', "max_tokens"),
        (b'"max_tokens":1e400', "max_tokens"),
        (b'"max_tokens":3,"max_completion_tokens":4', "max_tokens"),
        (b'"temperature":-1', "temperature"),
        (b'"temperature":1e308', "temperature"),
        (b'"temperature":1e400', "temperature"),
        (b'"temperature":-1e400', "temperature"),
        (b'"temperature":"hot"', "temperature"),
        (b'"top_p":-0.1', "top_p"),
        (b'"top_p":1.1', "top_p"),
        (b'"top_k":-5', "top_k"),
        (b'"min_p":2', "min_p"),
        (b'"seed":1180591620717411303424', "seed"),
        (b'"seed":' + b"9" * 5_000, "seed"),
        (b'"repetition_penalty":0', "repetition_penalty"),
        (b'"presence_penalty":3', "presence_penalty"),
        (b'"frequency_penalty":-3', "frequency_penalty"),
        (b'"top_logprobs":1000000,"logprobs":true', "top_logprobs"),
        (b'"top_logprobs":2', "top_logprobs"),
        (b'"logprobs":3', "logprobs"),
        (b'"stop":"' + b"x" * 2**20 + b'"', "stop"),
        (b'"stop":[' + b",".join([b'"x"'] * 10_000) + b"]", "stop"),
        (b'"stop":[1]', "stop[0]"),
        (b'"logit_bias":{"-1":1}', "logit_bias"),
        (b'"logit_bias":{"x":1}', "logit_bias"),
        (b'"logit_bias":{"5":101}', "logit_bias[...]"),
        (b'"logit_bias":{"5":1e999}', "logit_bias[...]"),
        (b'"stream":true,"stream_options":{"a":1}', "stream_options.a"),
        (b'"best_of":2', "best_of"),
        (b'"response_format":{"type":"json"}', "response_format.type"),
        (b'"chat_template":"x"', "chat_template"),
        (b'"chat_template_kwargs":{"tokenize":true}', "chat_template_kwargs.tokenize"),
        (b'"chat_template_kwargs":{"__class__":1}', "chat_template_kwargs.__class__"),
        (b'"functions":[{}]', "functions"),
        (b'"audio":{}', "audio"),
        (b'"reasoning_effort":3', "reasoning_effort"),
        (b'"modalities":["audio"]', "modalities[0]"),
        (b'"cache_salt":1', "cache_salt"),
        (b'"cache_salt":["x"]', "cache_salt"),
        (b'"cache_salt":"\\ud800"', None),
        (b'"cache_salt":"' + b"x" * 257 + b'"', "cache_salt"),
        (b'"cache_salt":"' + b"x" * 2**20 + b'"', "cache_salt"),
        (b'"speculation":"on"', "speculation"),
        (b'"speculation":true', "speculation"),
        (b'"speculation":[]', "speculation"),
        (b'"speculation":{"method":"magic"}', "speculation.method"),
        (b'"speculation":{"method":1}', "speculation.method"),
        (b'"speculation":{"method":"draft_model"}', "speculation.method"),
        (b'"speculation":{"method":"eagle","tokens":2}', "speculation.method"),
        (b'"speculation":{"tokens":-1}', "speculation.tokens"),
        (b'"speculation":{"tokens":17}', "speculation.tokens"),
        (b'"speculation":{"tokens":true}', "speculation.tokens"),
        (b'"speculation":{"tokens":2.0}', "speculation.tokens"),
        (b'"speculation":{"drafts":2}', "speculation.drafts"),
        (b'"no_such_field":1', "no_such_field"),
    ],
)
def test_invalid_chat_field_is_refused_with_its_name(fields: bytes, param: str | None) -> None:
    """B23 to B30, B35, B42: values out of range, of another type, or not supported."""
    error = _refused(_START + b"," + fields + b"}")
    if param is not None:
        assert error.param == param
    assert len(error.body()) < 1_000


@pytest.mark.parametrize("word", [b"NaN", b"Infinity", b"-Infinity", b"nan", b"01", b"+1", b".5"])
def test_request_body_with_number_that_json_forbids_is_refused(word: bytes) -> None:
    """B9: NaN, Infinity, leading zeros and signs are not JSON."""
    _refused(_START + b',"temperature":' + word + b"}")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (b'{"role":"bob","content":"x"}', "messages[1].role"),
        (b'{"content":"x"}', "messages[1].role"),
        (b'{"role":"user","content":null}', "messages[1].content"),
        (b'{"role":"user"}', "messages[1].content"),
        (b'{"role":"user","content":[[{"type":"text","text":"x"}]]}', "messages[1].content[0]"),
        (b'{"role":"user","content":[{"text":"x"}]}', "messages[1].content[0].type"),
        (b'{"role":"user","content":"x","zz":1}', "messages[1].zz"),
        (b'{"role":"assistant","content":"x","audio":{}}', "messages[1].audio"),
        (b'{"role":"tool","content":"x"}', "messages[1].tool_call_id"),
        (b"3", "messages[1]"),
    ],
)
def test_invalid_chat_message_is_refused_with_its_index_and_field(
    message: bytes, param: str
) -> None:
    """B34: unknown roles, missing or nested content."""
    body = b'{"model":"m","messages":[{"role":"user","content":"x"},' + message + b"]}"
    assert _refused(body).param == param


def test_request_with_too_many_messages_is_refused_within_half_a_second() -> None:
    """B34: 10,000 messages are refused in less than 0.5 s of CPU time."""
    one = b'{"role":"user","content":"x"}'
    start = time.process_time()
    assert (
        _refused(b'{"model":"m","messages":[' + b",".join([one] * 10_000) + b"]}").param
        == "messages"
    )
    assert time.process_time() - start < 0.5


def test_last_value_of_duplicate_json_key_is_used_and_checked() -> None:
    """B10: the checked value is the used one."""
    ok = request_body.decode(_chat, _START + b',"n":9999,"n":2}')
    assert check_chat(ok, Config()).count == 2
    assert _refused(_START + b',"n":1,"n":9999}').param == "n"


def test_null_field_has_same_effect_as_missing_field() -> None:
    """OpenAI's API accepts null for every optional field."""
    names = [field for field in ChatCompletionRequest.__struct_fields__ if field != "model"]
    names.remove("messages")
    fields = b",".join(b'"%b":null' % name.encode() for name in names)
    options = check_chat(request_body.decode(_chat, _START + b"," + fields + b"}"), Config())
    sampling = options.choice_sampling(0, 100)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert options.clamps_max_tokens


def test_logit_bias_for_token_id_outside_vocabulary_is_refused() -> None:
    """B30: a token id of the vocabulary's size or above gets a 400."""
    request = request_body.decode(_chat, _START + b',"logit_bias":{"100":1}}')
    with pytest.raises(ApiError, match="no token 100"):
        check_chat(request, Config()).choice_sampling(0, 100)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"logprobs":6', "logprobs"),
        (b'"logprobs":true', "logprobs"),
        (b'"best_of":2,"n":3', "best_of"),
        (b'"best_of":2,"stream":true', "best_of"),
        (b'"best_of":1000', "best_of"),
        (b'"suffix":1', "suffix"),
        (b'"echo":true,"logprobs":1', "echo"),
        (b'"messages":[]', "messages"),
    ],
)
def test_invalid_completion_field_is_refused_with_its_name(fields: bytes, param: str) -> None:
    """/v1/completions has other bounds for logprobs, best_of, suffix and echo."""
    body = b'{"model":"m","prompt":"x",' + fields + b"}"
    with pytest.raises(ApiError) as caught:
        check_completion(request_body.decode(_completion, body), Config())
    assert (caught.value.status, caught.value.param) == (400, param)


def test_choices_of_one_request_get_different_but_repeatable_seeds() -> None:
    """The first choice has the request's seed, the others have seeds derived from it."""
    seeds = [mix_seed(7, number) for number in range(8)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 8
    assert seeds == [mix_seed(7, number) for number in range(8)]
    assert all(0 <= mix_seed(seed, n) < 2**63 for seed in (-(2**63), -1, 2**63 - 1) for n in (0, 3))


@pytest.mark.parametrize(
    "part",
    [b'{"a":1}', b"[]", b'{"a":{"b":[1,2]}}'],
)
def test_body_with_too_many_json_brackets_is_refused_before_decoding(part: bytes) -> None:
    """Counting the brackets of a million objects is fast; decoding them takes a second."""
    body = _START + b',"tools":[' + b",".join([part] * 200_000) + b"]}"
    start_s = time.process_time()
    assert str(request_body.PARTS_MAX) in _refused(body).message
    assert time.process_time() - start_s < 0.5


@pytest.mark.parametrize(
    "text", ['[{"a": [1]}]', "{[:]}\\", 'say "[]" or \\"{}\\"', '\\\\"[', "x = {'a': [1]}"]
)
def test_brackets_inside_json_strings_do_not_count_towards_limit(text: str) -> None:
    """Program text has many brackets and is a valid prompt."""
    fields = {"model": "m", "prompt": text * (request_body.PARTS_MAX // 2)}
    decoded = request_body.decode(_completion, msgspec.json.encode(fields))
    assert decoded.prompt == fields["prompt"]


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (b'{"model":"m","prompt":"x","stop":[', b'"a"'),
        (b'{"model":"m","prompt":[', b"[1,1]"),
        (b'{"model":"m","prompt":[', b"null"),
        (b'{"model":"m","prompt":[', b'{"a":1}'),
        (b'{"model":"m","prompt":[', b"1"),
        (b'{"model":"m","prompt":[', b"9" * 4_000),
    ],
)
def test_long_list_of_any_kind_is_refused_before_decoding(start: bytes, part: bytes) -> None:
    """16 MB of list elements of any type are never decoded."""
    count = 16_000_000 // (len(part) + 1)
    body = start + b",".join([part] * count) + b"]}"
    start_s = time.process_time()
    with pytest.raises(ApiError, match="has more than") as caught:
        request_body.decode(_completion, body)
    assert caught.value.status == 400
    assert time.process_time() - start_s < 0.5


def test_prompts_of_token_ids_that_fill_long_contexts_are_decoded() -> None:
    """64 prompts of 8,100 token ids are a valid request of half a million numbers."""
    prompt = [list(range(8_100))] * 64
    body = msgspec.json.encode({"model": "m", "prompt": prompt})
    assert request_body.decode(_completion, body).prompt == prompt


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('a[]{},:"\\0', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=30,
)


def _values(value: object) -> tuple[int, int]:
    """Return how many values there are without numbers in lists, and how many such numbers."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    values, numbers = 1, 0
    for one in inner:
        is_number = isinstance(value, list) and isinstance(one, int) and not isinstance(one, bool)
        more = (0, 1) if is_number else _values(one)
        values, numbers = values + more[0], numbers + more[1]
    return values, numbers


@settings(max_examples=cases(100, 300))
@given(value=_json)
def test_counted_parts_are_never_fewer_than_those_of_the_text(value: object) -> None:
    """Brackets and commas in strings do not count, and at most short lists count twice."""
    values, numbers = _values(value)
    text = msgspec.json.encode(value)
    [(parts, counted_numbers)] = request_body._count_parts(text)
    assert counted_numbers == numbers
    assert values - 1 <= parts <= 2 * values


@settings(max_examples=cases(100, 300))
@given(value=_json, size=st.integers(1, 40))
def test_text_counted_in_pieces_has_as_many_parts(value: object, size: int) -> None:
    """A piece may end in a string or after a backslash; only a number at its end may be missed."""
    text = msgspec.json.encode(["\\" * 3, value, "]", value])
    [whole] = request_body._count_parts(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "_PIECE_BYTES", size)
        pieces = list(request_body._count_parts(text))
    assert sum(parts for parts, _ in pieces) + sum(numbers for _, numbers in pieces) >= whole[0]


def test_error_about_very_long_name_is_short_and_fast() -> None:
    """The name of an unknown field may have 16 MB; the error repeats its beginning."""
    body = b'{"model":"m","prompt":"x","' + b"n" * 16_000_000 + b'":1}'
    start_s = time.process_time()
    with pytest.raises(ApiError) as caught:
        request_body.decode(_completion, body)
    assert caught.value.code == "unknown_parameter"
    assert len(caught.value.body()) < 1_000
    assert time.process_time() - start_s < 0.5


def _chat_with_arguments(arguments: list[str]) -> bytes:
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": one}}
        for number, one in enumerate(arguments)
    ]
    message = {"role": "assistant", "tool_calls": calls}
    return msgspec.json.encode({"model": "m", "messages": [message]})


def test_arguments_nested_too_deeply_are_refused_with_their_field() -> None:
    """Tool-call arguments are JSON in a string: their depth is checked like that of other JSON."""
    deep = '{"a":' + "[" * 500 + "]" * 500 + "}"
    deeper = '{"a":' + "[" * 50_000 + "]" * 50_000 + "}"
    for arguments in (deep, deeper):
        body = request_body.decode(_chat, _chat_with_arguments(["{}", arguments]))
        with pytest.raises(ApiError) as caught:
            read_messages(body.messages, [])
        assert caught.value.status == 400
        assert caught.value.param == "messages[0].tool_calls[1].function.arguments"


@pytest.mark.parametrize("text", ["", " \n", "{}"])
def test_call_without_arguments_has_an_empty_object(text: str) -> None:
    """Some clients send an empty text for a call without arguments."""
    body = request_body.decode(_chat, _chat_with_arguments([text]))

    assert read_messages(body.messages, [])[0].calls[0].arguments == {}


def test_arguments_with_too_many_parts_together_are_refused_before_decoding() -> None:
    """The parts of all tool calls count together, because each text alone may be short."""
    half = '{"a":[' + ",".join(['"x"'] * (request_body.PARTS_MAX // 2)) + "]}"
    body = request_body.decode(_chat, _chat_with_arguments([half]))
    assert len(read_messages(body.messages, [])) == 1
    body = request_body.decode(_chat, _chat_with_arguments([half, half]))
    with pytest.raises(ApiError, match="has more than"):
        read_messages(body.messages, [])


def test_part_with_an_integer_of_any_size_becomes_json_again() -> None:
    """Clients may send them, and the fast writer of JSON knows 64 bits."""
    value = {"maximum": 10**30, "text": "\u00e9", "list": [1, None]}
    assert msgspec.json.decode(request_body.to_json(value)) == value


def test_part_that_is_nested_too_deeply_is_refused_where_it_becomes_json() -> None:
    """A part without effect may be nested more deeply than others, up to a bound."""
    value: list[object] = []
    for _ in range(400):
        value = [value]
    assert request_body.to_json(value) == b"[" * 401 + b"]" * 401
    for _ in range(200_000):
        value = [value]
    with pytest.raises(ApiError) as found:
        request_body.to_json(value)
    assert found.value.status == 400
