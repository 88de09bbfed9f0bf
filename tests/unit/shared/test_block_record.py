"""The record format of stored blocks."""

import array
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import limits
from shared.block_record import (
    HEADER_BYTES,
    RecordIdentity,
    RecordUnreadable,
    build_header,
    check_record,
    read_header,
)
from tests.support.effort import cases

IDENTITY = RecordIdentity(
    namespace="0123456789abcdef" * 2, rank=1, world_size=4, hash=bytes(range(32)), kind="block",
    tokens=256,
)  # fmt: skip
PAYLOAD = bytes(range(200))

_IDENTITIES = st.builds(
    RecordIdentity,
    namespace=st.text("0123456789abcdef", max_size=64),
    rank=st.integers(0, limits.RANKS_MAX - 1),
    world_size=st.integers(1, limits.RANKS_MAX),
    hash=st.binary(min_size=32, max_size=32),
    kind=st.sampled_from(["block", "checkpoint"]),
    tokens=st.integers(0, 2**32 - 1),
)


def build_record(identity: RecordIdentity = IDENTITY, payload: bytes = PAYLOAD) -> bytes:
    """Return a complete record."""
    return build_header(identity, payload) + payload


@settings(max_examples=cases(60, 300))
@given(identity=_IDENTITIES, payload=st.binary(max_size=1_000))
def test_kv_block_record_is_read_back_with_identity_and_payload(
    identity: RecordIdentity, payload: bytes
) -> None:
    """Every identity and payload is read back, whether or not the reader expects an identity."""
    data = build_record(identity, payload)

    assert read_header(data) == (identity, len(payload))
    for expected in (identity, None):
        found, view = check_record(memoryview(data), expected)
        assert (found, bytes(view)) == (identity, payload)


def test_reading_kv_block_record_copies_no_payload_bytes() -> None:
    """Reading copies nothing: the payload is the record's own memory behind the header."""
    data = bytearray(build_record())

    _, view = check_record(memoryview(data), IDENTITY)
    data[HEADER_BYTES] ^= 0xFF

    assert len(build_header(IDENTITY, PAYLOAD)) == HEADER_BYTES
    assert view[0] == PAYLOAD[0] ^ 0xFF


def test_kv_block_record_of_float32_payload_is_read_as_bytes() -> None:
    """A payload of float32 items is read back as its bytes."""
    payload = memoryview(array.array("f", [1.0, -2.0, 3.5]))

    _, view = check_record(build_header(IDENTITY, payload) + bytes(payload), IDENTITY)

    assert bytes(view) == bytes(payload)


def test_kv_block_record_with_any_flipped_bit_is_refused() -> None:
    """Every changed bit is detected, also in the unused part of the header."""
    whole = build_record(payload=PAYLOAD[:64])

    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordUnreadable) as refused:
            check_record(bytes(flipped), None)
        assert refused.value.cause == "damaged", bit


def test_kv_block_record_is_refused_when_cut_or_padded() -> None:
    """A record that is cut at any length, or followed by zeros or another record, is refused."""
    whole = build_record()

    for length in range(len(whole)):
        with pytest.raises(RecordUnreadable) as refused:
            check_record(whole[:length], IDENTITY)
        assert refused.value.cause == "torn", length
    for padding in (b"\0", bytes(4_096), whole):
        with pytest.raises(RecordUnreadable, match="should have 456 bytes"):
            check_record(whole + padding, IDENTITY)


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": "00"},
        {"rank": 2},
        {"world_size": 2},
        {"hash": bytes(32)},
        {"kind": "checkpoint"},
        {"tokens": 255},
    ],
)
def test_kv_block_record_is_refused_when_identity_differs_from_expected(
    change: dict[str, Any],
) -> None:
    """A valid record of another identity is refused, and the error names the field."""
    other = dataclasses.replace(IDENTITY, **change)

    with pytest.raises(RecordUnreadable, match=next(iter(change))) as refused:
        check_record(build_record(other), IDENTITY)

    assert refused.value.cause == "identity"


def test_kv_block_record_is_refused_with_payload_of_another_record() -> None:
    """The checksum covers identity and payload: a payload of the same length from another record
    fails."""
    other = bytes(reversed(PAYLOAD))

    with pytest.raises(RecordUnreadable, match="payload does not match"):
        check_record(build_header(IDENTITY, PAYLOAD) + other, IDENTITY)


def test_kv_block_record_of_later_format_version_is_refused_with_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error for a record of a later format has both versions, and does not call it damaged."""
    monkeypatch.setattr(limits, "RECORD_FORMAT_VERSION", limits.RECORD_FORMAT_VERSION + 1)
    later = build_record()
    monkeypatch.undo()

    with pytest.raises(RecordUnreadable, match="has format 2, not 1") as refused:
        check_record(later, IDENTITY)

    assert refused.value.cause == "version"


@settings(max_examples=cases(100, 500))
@given(data=st.binary(max_size=600), keep=st.integers(0, HEADER_BYTES))
def test_reading_arbitrary_bytes_as_record_raises_only_record_unreadable(
    data: bytes, keep: int
) -> None:
    """Arbitrary bytes, also after the start of a valid record, raise no other error."""
    mixed = build_record()[:keep] + data
    if mixed.startswith(build_record()):
        return

    with pytest.raises(RecordUnreadable):
        check_record(mixed, None)


def test_headers_of_kv_block_file_locate_every_record_until_its_end() -> None:
    """The headers alone lead from record to record until the end of the file."""
    identities = [dataclasses.replace(IDENTITY, tokens=tokens) for tokens in (16, 32, 48)]
    file = b"".join(build_record(identity, bytes(identity.tokens)) for identity in identities)

    found, offset = [], 0
    while offset < len(file):
        identity, payload_bytes = read_header(file[offset:])
        found.append(identity)
        offset += HEADER_BYTES + payload_bytes

    assert found == identities
    assert offset == len(file)


def test_kv_block_record_header_equals_fixed_bytes_of_this_version() -> None:
    """Later builds must read records of this version: these bytes must never change."""
    assert build_header(IDENTITY, PAYLOAD).hex() == GOLDEN


GOLDEN = (
    "4c53424c4f434b0a01000100040000000001000000000000c800000000000000"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "3031323334353637383961626364656630313233343536373839616263646566"
    "0000000000000000000000000000000000000000000000000000000000000000"
    "0000000000000000000000000000000000000000000000000000000000000000"
    "0000000000000000000000000000000000000000000000000000000000000000"
    "0000000000000000000000000000000000000000000000000000000000000000"
    "0000000000000000dbcf6c38251a11ef9a641b959024882d79a42bce7b3aa988"
)
