"""Names of canary findings."""

import pytest

from shared.canary_names import PROMPT_PREFIX, SUM_PREFIX, decode_name, parse_decode_name


@pytest.mark.parametrize(("sums", "rows"), [(0, 1), (65, 1), (129, 8)])
def test_canary_decode_name_is_parsed_to_its_sums_and_rows(sums: int, rows: int) -> None:
    """A name is parsed to the numbers from which it was built."""
    assert parse_decode_name(decode_name(sums, rows)) == (sums, rows)


@pytest.mark.parametrize(
    "name", [f"{SUM_PREFIX}1 int32", f"{PROMPT_PREFIX}4,500 tokens", "", "7 sums"]
)
def test_other_canary_names_are_not_parsed_as_decode_names(name: str) -> None:
    """Names of other findings are not parsed, and a decode name has no prefix of theirs."""
    assert parse_decode_name(name) is None
    assert not decode_name(1, 1).startswith((SUM_PREFIX, PROMPT_PREFIX))
