"""Bodies: what goes in comes out, and what is no message is refused with its cause."""

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
)
from shared.transport import codec
from tests.effort import cases
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
def test_every_message_survives_the_wire(
    message: type[msgspec.Struct], union: Any, data: st.DataObject
) -> None:
    """Any valid message decodes to an equal one."""
    sent = data.draw(instances(message))

    assert codec.Decoder(union).decode(codec.encode(sent)) == sent


def test_every_message_has_its_own_tag() -> None:
    """The class name is the tag, and no two messages share one."""
    tags = [msgpack.unpackb(codec.encode(AbortRequest(request_id="a")))["type"]]
    tags += [message.__struct_config__.tag for message, _ in EVERY_MESSAGE]

    assert tags[0] == "AbortRequest"
    assert sorted(set(tags)) == sorted(message.__name__ for message, _ in EVERY_MESSAGE)


def test_a_link_refuses_what_belongs_on_another() -> None:
    """A rank cannot be told what only a gateway may say."""
    body = codec.encode(AbortRequest(request_id="a"))

    assert "AbortRequest" in _refusal(body, ToRank)


@settings(max_examples=cases(60, 300))
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_valid(body: bytes) -> None:
    """Whatever arrives, `decode` returns a message or raises FrameRefused, nothing else."""
    with contextlib.suppress(FrameRefused):
        assert isinstance(codec.Decoder(ToScheduler).decode(body), msgspec.Struct)


@settings(max_examples=cases(40, 200))
@given(instances(StepPlan), st.data())
def test_a_truncated_message_is_refused(message: msgspec.Struct, data: st.DataObject) -> None:
    """No beginning of a message is a message."""
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
        (None, "null"),
        (17, "int"),
        ({"type": "Heartbeat", "epoch": -1, "rank": 0, "step_started": 0}, "epoch"),
        ({"type": "Heartbeat", "epoch": 1.5, "rank": 0, "step_started": 0}, "epoch"),
        ({"type": "Heartbeat", "epoch": True, "rank": 0, "step_started": 0}, "epoch"),
    ],
)
def test_a_wrong_value_is_refused_by_name(value: Any, cause: str) -> None:
    """Unknown, missing, mistyped and out-of-range fields are named in the refusal."""
    assert cause in _refusal(msgpack.packb(value))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(number: float) -> None:
    """NaN and infinity never reach a scheduler or a sampler, however deep they lie."""
    sampling = Sampling(seed=1, temperature=number)
    request = SubmitRequest(request_id="a", prompt=[1], sampling=sampling, max_tokens=1)
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
def test_no_bit_pattern_of_a_number_that_is_none_gets_through(
    payload: int, sign: int, is_single: bool
) -> None:
    """Every NaN has its own bits, and msgpack has two widths; nobody must know them all."""
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
    "look", [b"\xcb\x7f\xf0", b"\xcb\xff\xf8", b"\xca\x7f\x80", b"\xca\xff\xff"]
)
def test_bytes_that_only_look_like_such_a_number_pass(look: bytes) -> None:
    """A digest may have any bytes."""
    sent = StepFinished(
        epoch=1,
        step_id=1,
        rank=0,
        digest=(look * 8)[:16],
        busy_ms=1.0,
        idle_ms=1.0,
        memory_bytes=0,
    )

    assert codec.Decoder(ToScheduler).decode(codec.encode(sent)) == sent


@pytest.mark.parametrize("depth", [limits.MESSAGE_DEPTH_MAX + 1, 500, 5_000, 1_000_000])
def test_a_depth_bomb_is_refused(depth: int) -> None:
    """Nesting costs neither the stack nor time."""
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
def test_hostile_bytes_are_refused(body: bytes) -> None:
    """Extension types, bad UTF-8, odd keys, trailing bytes and lying lengths are no messages."""
    assert _refusal(body)


def test_a_long_prompt_is_taken() -> None:
    """A prompt of 1,000,000 ids fits into one message."""
    sampling = Sampling(seed=1)
    request = SubmitRequest(
        request_id="a", prompt=[151_000] * 1_000_000, sampling=sampling, max_tokens=1
    )

    body = codec.encode(request)

    assert len(body) < limits.MESSAGE_BYTES_MAX
    assert codec.Decoder(ToScheduler).decode(body) == request


def test_empty_messages_and_gauges_survive() -> None:
    """A message without fields and one with free-form maps decode to equals."""
    status = StatusReported(
        ready=False, reason="x", draining=False, model="m", model_fingerprint="", epoch=0,
        world_size=1, backend="off", ranks=[], running=0, waiting=0, kv_tokens_used=0,
        kv_tokens_max=0, context_tokens_max=0, steps=0, counters={"a": 1.5}, gauges={},
    )  # fmt: skip

    assert codec.Decoder(ToScheduler).decode(codec.encode(QueryStatus())) == QueryStatus()
    assert codec.Decoder(ToGateway).decode(codec.encode(status)) == status
