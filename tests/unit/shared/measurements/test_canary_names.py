"""Names of canary findings."""

import pytest

from shared.measurements.canary_names import (
    PROMPT_PREFIX,
    SUM_PREFIX,
    decode_name,
    parse_decode_name,
)


@pytest.mark.parametrize(("sums", "rows"), [(0, 1), (65, 1), (129, 8)])
def test_numbers_of_sums_and_rows_are_read_back_from_canary_timing_name(
    sums: int, rows: int
) -> None:
    """The name of a timed decode step gives back the numbers from which it was built."""
    assert parse_decode_name(decode_name(sums, rows)) == (sums, rows)


@pytest.mark.parametrize(
    "name", [f"{SUM_PREFIX}1 int32", f"{PROMPT_PREFIX}4,500 tokens", "", "7 sums"]
)
def test_names_of_other_canary_findings_give_no_sums_and_rows(name: str) -> None:
    """Names of other findings are not parsed, and the name of a decode step has no prefix of
    theirs."""
    assert parse_decode_name(name) is None
    assert not decode_name(1, 1).startswith((SUM_PREFIX, PROMPT_PREFIX))
