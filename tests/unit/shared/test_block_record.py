"""Records of stored blocks: what is read is what was written, or it is refused."""

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
from tests.effort import cases

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


def record(identity: RecordIdentity = IDENTITY, payload: bytes = PAYLOAD) -> bytes:
    """Return a whole record."""
    return build_header(identity, payload) + payload


@settings(max_examples=cases(60, 300))
@given(identity=_IDENTITIES, payload=st.binary(max_size=1_000))
def test_what_was_written_is_read(identity: RecordIdentity, payload: bytes) -> None:
    """Every identity and payload comes back whole, whether or not it was known before."""
    data = record(identity, payload)

    assert read_header(data) == (identity, len(payload))
    for expected in (identity, None):
        found, view = check_record(memoryview(data), expected)
        assert (found, bytes(view)) == (identity, payload)


def test_the_payload_is_a_view_at_a_constant_offset() -> None:
    """Reading copies nothing: the payload is the record's own memory behind the header."""
    data = bytearray(record())

    _, view = check_record(memoryview(data), IDENTITY)
    data[HEADER_BYTES] ^= 0xFF

    assert len(build_header(IDENTITY, PAYLOAD)) == HEADER_BYTES
    assert view[0] == PAYLOAD[0] ^ 0xFF


def test_items_wider_than_a_byte() -> None:
    """A payload of floats is its bytes."""
    payload = memoryview(array.array("f", [1.0, -2.0, 3.5]))

    _, view = check_record(build_header(IDENTITY, payload) + bytes(payload), IDENTITY)

    assert bytes(view) == bytes(payload)


def test_every_flipped_bit_is_found() -> None:
    """No bit of a record can change unseen, the header's unused ones neither."""
    whole = record(payload=PAYLOAD[:64])

    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordUnreadable) as refused:
            check_record(bytes(flipped), None)
        assert refused.value.cause == "damaged", bit


def test_every_cut_and_every_padding_is_found() -> None:
    """A record is whole or refused: cut off anywhere, padded with zeros or with another record."""
    whole = record()

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
def test_another_records_bytes_are_refused(change: dict[str, Any]) -> None:
    """A whole record of another identity is refused, and the sentence names the field."""
    other = dataclasses.replace(IDENTITY, **change)

    with pytest.raises(RecordUnreadable, match=next(iter(change))) as refused:
        check_record(record(other), IDENTITY)

    assert refused.value.cause == "identity"


def test_a_payload_under_another_header_is_refused() -> None:
    """The checksum covers identity and payload together: swapped payloads of one length fail."""
    other = bytes(reversed(PAYLOAD))

    with pytest.raises(RecordUnreadable, match="payload does not match"):
        check_record(build_header(IDENTITY, PAYLOAD) + other, IDENTITY)


def test_another_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of a later format is no damage: it says which version it is."""
    monkeypatch.setattr(limits, "RECORD_FORMAT_VERSION", limits.RECORD_FORMAT_VERSION + 1)
    later = record()
    monkeypatch.undo()

    with pytest.raises(RecordUnreadable, match="has format 2, not 1") as refused:
        check_record(later, IDENTITY)

    assert refused.value.cause == "version"


@settings(max_examples=cases(100, 500))
@given(data=st.binary(max_size=600), keep=st.integers(0, HEADER_BYTES))
def test_any_bytes_are_refused_in_words(data: bytes, keep: int) -> None:
    """Foreign bytes, also behind the beginning of a true record, raise nothing else."""
    mixed = record()[:keep] + data
    if mixed.startswith(record()):
        return

    with pytest.raises(RecordUnreadable):
        check_record(mixed, None)


def test_records_stand_one_behind_the_other() -> None:
    """Headers alone lead from record to record, to the end of the file."""
    identities = [dataclasses.replace(IDENTITY, tokens=tokens) for tokens in (16, 32, 48)]
    file = b"".join(record(identity, bytes(identity.tokens)) for identity in identities)

    found, offset = [], 0
    while offset < len(file):
        identity, payload_bytes = read_header(file[offset:])
        found.append(identity)
        offset += HEADER_BYTES + payload_bytes

    assert found == identities
    assert offset == len(file)


def test_the_format_stands_still() -> None:
    """Records of this version are read by every later build: these bytes must never change."""
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
