"""Names of findings are read back by those who show them."""

import pytest

from shared.canary_names import PROMPT_PREFIX, SUM_PREFIX, decode_name, parse_decode_name


@pytest.mark.parametrize(("sums", "rows"), [(0, 1), (65, 1), (129, 8)])
def test_the_sums_of_a_decode_are_read_off_their_name(sums: int, rows: int) -> None:
    """Both numbers come back."""
    assert parse_decode_name(decode_name(sums, rows)) == (sums, rows)


@pytest.mark.parametrize(
    "name", [f"{SUM_PREFIX}1 int32", f"{PROMPT_PREFIX}4,500 tokens", "", "7 sums"]
)
def test_other_names_are_none_of_a_decode(name: str) -> None:
    """Nor do a decode's begin as theirs."""
    assert parse_decode_name(name) is None
    assert not decode_name(1, 1).startswith((SUM_PREFIX, PROMPT_PREFIX))
