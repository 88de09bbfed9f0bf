"""Packed token ids."""

import pytest

from shared.messages import token_ids


def test_packed_ids_are_little_endian_int32_and_unpack_to_same_ids() -> None:
    """Each id takes four bytes, the lowest first; unpacking returns the ids."""
    ids = [0, 1, 258, 2**31 - 1]

    assert token_ids.pack(ids)[8:12] == bytes([2, 1, 0, 0])
    assert token_ids.unpack(token_ids.pack(ids)).tolist() == ids


def test_part_of_token_id_cannot_be_unpacked() -> None:
    """Bytes that end within an id are an error."""
    with pytest.raises(ValueError, match="multiple"):
        token_ids.unpack(bytes(7))


@pytest.mark.parametrize(("ids", "expected"), [([0, 9], True), ([10], False), ([3, -1], False)])
def test_ids_are_valid_if_at_least_0_and_below_size(ids: list[int], expected: bool) -> None:
    """A negative id and one that is too large are not valid."""
    assert token_ids.all_below(token_ids.unpack(token_ids.pack(ids)), 10) is expected
