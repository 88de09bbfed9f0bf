"""Encoding of message bodies, and the refusal of bodies that are no messages."""

import contextlib
import math
import struct
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import limits
from shared.errors import FrameRefused
from shared.messages import (
    AbortRequest,
    QueryStatus,
    Sampling,
    StatusReported,
    StepFinished,
    StepPlan,
    SubmitRequest,
    ToGateway,
    TokenLogprobs,
    TokensGenerated,
    ToRank,
    ToScheduler,
    token_ids,
)
from shared.transport import codec
from tests.support.effort import cases
from tests.unit.shared.messages.message_strategies import instances

EVERY_MESSAGE: list[tuple[type[msgspec.Struct], Any]] = [
    (message, union) for union in (ToScheduler, ToGateway, ToRank) for message in get_args(union)
]


def _refusal(body: bytes, union: Any = ToScheduler) -> str:
    with pytest.raises(FrameRefused) as refused:
        codec.Decoder(union).decode(body)
    return str(refused.value)


@pytest.mark.parametrize(("message", "union"), EVERY_MESSAGE, ids=lambda item: str(item)[:40])
@settings(max_examples=cases(12, 60))
@given(data=st.data())
def test_every_encoded_message_decodes_to_equal_message(
    message: type[msgspec.Struct], union: Any, data: st.DataObject
) -> None:
    """Any valid message decodes to an equal one."""
    sent = data.draw(instances(message))

    assert codec.Decoder(union).decode(codec.encode(sent)) == sent


def test_message_tag_is_unique_class_name() -> None:
    """The tag of a message is its class name, and no two messages share one."""
    tags = [msgpack.unpackb(codec.encode(AbortRequest(request_id="a")))["type"]]
    tags += [message.__struct_config__.tag for message, _ in EVERY_MESSAGE]

    assert tags[0] == "AbortRequest"
    assert sorted(set(tags)) == sorted(message.__name__ for message, _ in EVERY_MESSAGE)


def test_decoder_refuses_message_that_belongs_to_another_link() -> None:
    """A rank refuses a message that only a gateway may send."""
    body = codec.encode(AbortRequest(request_id="a"))

    assert "AbortRequest" in _refusal(body, ToRank)


@settings(max_examples=cases(60, 300))
@given(st.binary(max_size=200))
def test_decoder_raises_only_frame_refused_for_random_bytes(body: bytes) -> None:
    """`decode` returns a message or raises FrameRefused, for any bytes."""
    with contextlib.suppress(FrameRefused):
        assert isinstance(codec.Decoder(ToScheduler).decode(body), msgspec.Struct)


@settings(max_examples=cases(40, 200))
@given(instances(StepPlan), st.data())
def test_decoder_refuses_message_truncated_at_any_byte(
    message: msgspec.Struct, data: st.DataObject
) -> None:
    """No beginning of a message decodes."""
    body = codec.encode(message)
    length = data.draw(st.integers(0, len(body) - 1))

    assert _refusal(body[:length], ToRank)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ({"type": "QueryStatus", "colour": "blue"}, "colour"),
        ({"type": "AbortRequest"}, "request_id"),
        ({"type": "AbortRequest", "request_id": 7}, "request_id"),
        ({"type": "AbortRequest", "request_id": ""}, "request_id"),
        ({"type": "AbortRequest", "request_id": "x" * 200}, "request_id"),
        ({"type": "AbortRequest", "request_id": "a", "reason": "mood"}, "reason"),
        ({"type": "Nonsense"}, "Nonsense"),
        ({"kind": "QueryStatus"}, "type"),
        ({"type": 7}, "type"),
        ({"type": ["QueryStatus"]}, "type"),
        ({"type": "StepPlan", "epoch": 1}, "StepPlan"),
        ({}, "type"),
        ([], "array"),
        ("QueryStatus", "str"),
        (None, "None"),
        (17, "int"),
        ({"type": "Heartbeat", "epoch": -1, "rank": 0, "step_started": 0}, "epoch"),
        ({"type": "Heartbeat", "epoch": 1.5, "rank": 0, "step_started": 0}, "epoch"),
        ({"type": "Heartbeat", "epoch": True, "rank": 0, "step_started": 0}, "epoch"),
    ],
)
def test_decoder_refuses_invalid_field_and_names_it(value: Any, cause: str) -> None:
    """The error names an unknown, missing, mistyped or out-of-range field."""
    assert cause in _refusal(msgpack.packb(value))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_decoder_refuses_nan_and_infinity_at_any_depth(number: float) -> None:
    """NaN and infinity never reach a scheduler or a sampler."""
    sampling = Sampling(seed=1, temperature=number)
    request = SubmitRequest(
        request_id="a", prompt=token_ids.pack([1]), sampling=sampling, max_tokens=1
    )
    logprobs = TokenLogprobs(logprob=0.0, top_ids=[1], top_logprobs=[number])
    generated = TokensGenerated(
        request_ids=["a"], positions=[0], tokens=[[1]], logprobs=[[logprobs]]
    )

    assert _refusal(codec.encode(request))
    assert "finite" in _refusal(codec.encode(generated), ToGateway)


@settings(max_examples=cases(60, 300))
@given(
    payload=st.integers(min_value=0, max_value=2**52 - 1),
    sign=st.sampled_from([0x7FF0_0000_0000_0000, 0xFFF0_0000_0000_0000]),
    is_single=st.booleans(),
)
def test_decoder_refuses_every_bit_pattern_of_nan(payload: int, sign: int, is_single: bool) -> None:
    """NaN has many bit patterns, and msgpack has floats of two widths."""
    number = struct.unpack(">d", (sign | payload).to_bytes(8, "big"))[0]
    logprobs = {"logprob": 0.0, "top_ids": [1], "top_logprobs": [number]}
    fields = {
        "type": "TokensGenerated",
        "request_ids": ["a"],
        "positions": [0],
        "tokens": [[1]],
        "logprobs": [[logprobs]],
    }
    body = msgpack.packb(fields, use_single_float=is_single)

    assert "finite" in _refusal(body, ToGateway)


@pytest.mark.parametrize(
    "pattern", [b"\xcb\x7f\xf0", b"\xcb\xff\xf8", b"\xca\x7f\x80", b"\xca\xff\xff"]
)
def test_decoder_accepts_nan_bit_pattern_in_bytes_field(pattern: bytes) -> None:
    """A digest may consist of any bytes."""
    sent = StepFinished(
        epoch=1,
        step_id=1,
        rank=0,
        digest=(pattern * 8)[:16],
        busy_ms=1.0,
        idle_ms=1.0,
        memory_bytes=0,
    )

    assert codec.Decoder(ToScheduler).decode(codec.encode(sent)) == sent


@pytest.mark.parametrize("depth", [limits.MESSAGE_DEPTH_MAX + 1, 500, 5_000, 1_000_000])
def test_decoder_refuses_deeply_nested_message_body(depth: int) -> None:
    """Deep nesting exhausts neither the stack nor the time."""
    assert _refusal(b"\x91" * depth + b"\x01")
    assert _refusal(b"\x81\xa1a" * depth + b"\x01")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb(1) + msgpack.packb(2),
        msgpack.packb(msgpack.ExtType(5, b"code")),
        msgpack.packb({"type": msgpack.ExtType(5, b"code")}),
        msgpack.packb(msgpack.ExtType(5, b"")),
        msgpack.packb(msgpack.Timestamp(1)),
        msgpack.packb({"type": "AbortRequest", "request_id": b"a"}),
        msgpack.packb({1: "QueryStatus"}),
        msgpack.packb({b"type": "QueryStatus"}),
        b"\x81\xa4type\xa5\xff\xfe\xfd\xfc\xfb",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
    ids=lambda body: body[:12].hex() or "empty",
)
def test_decoder_refuses_invalid_msgpack(body: bytes) -> None:
    """Extension types, invalid UTF-8, wrong keys, trailing bytes and wrong lengths are refused."""
    assert _refusal(body)


def test_prompt_of_million_tokens_fits_into_message() -> None:
    """A prompt of 1,000,000 token ids is below the limit of a message."""
    sampling = Sampling(seed=1)
    request = SubmitRequest(
        request_id="a",
        prompt=token_ids.pack([151_000] * 1_000_000),
        sampling=sampling,
        max_tokens=1,
    )

    body = codec.encode(request)

    assert len(body) < limits.MESSAGE_BYTES_MAX
    assert codec.Decoder(ToScheduler).decode(body) == request


@pytest.mark.parametrize("field", ["prompt", "generated"])
def test_decoder_refuses_part_of_token_id(field: str) -> None:
    """Bytes that are not a whole number of token ids are refused when the message is decoded."""
    sampling = {"seed": 1}
    fields = {"type": "SubmitRequest", "request_id": "a", "sampling": sampling, "max_tokens": 1}

    assert "4 bytes" in _refusal(msgpack.packb({**fields, "prompt": bytes(4), field: bytes(6)}))


def test_messages_without_fields_and_with_free_form_maps_decode_to_equal_messages() -> None:
    """A message without fields and one with free-form maps decode to equal messages."""
    status = StatusReported(
        ready=False, reason="x", draining=False, model="m", model_fingerprint="", epoch=0,
        world_size=1, backend="off", ranks=[], running=0, waiting=0, kv_tokens_used=0,
        kv_tokens_max=0, context_tokens_max=0, steps=0, counters={"a": 1.5}, gauges={},
    )  # fmt: skip

    assert codec.Decoder(ToScheduler).decode(codec.encode(QueryStatus())) == QueryStatus()
    assert codec.Decoder(ToGateway).decode(codec.encode(status)) == status
