"""Agreement of ranks on code, model and settings before they compute together."""

import pytest

from services.rank_worker.joining import agreement

EQUAL_FACTS = {
    "lockstep": "0.1.0 0123456789ab",
    "model (path, dtype)": "5e" * 16,
    "model.context_tokens_max": "8192",
    "speculation.method": "draft_model",
    "speculation.draft_model": "a1" * 16,
    "rank_worker.kv_bits": "8",
}
OTHER_FACTS = {
    "lockstep": "0.1.0 0123456789ac",
    "model (path, dtype)": "5e" * 15 + "5f",
    "model.context_tokens_max": "4096",
    "speculation.method": "eagle",
    "speculation.draft_model": "none",
    "rank_worker.kv_bits": "0",
}


def _find_difference(*facts: dict[str, str]) -> str | None:
    """Return the difference that the last of several ranks finds."""
    rows = [agreement.encode_row(one) for one in facts]
    assert agreement.rows_intact(rows)
    return agreement.find_difference(facts[-1], rows)


def test_ranks_with_equal_settings_find_no_difference() -> None:
    """Ranks with equal settings find no difference."""
    assert _find_difference(EQUAL_FACTS) is None
    assert _find_difference(*[EQUAL_FACTS] * 5) is None


@pytest.mark.parametrize("name", list(OTHER_FACTS))
def test_error_about_ranks_differing_in_one_setting_names_only_this_setting(name: str) -> None:
    """A rank that differs in one setting is refused with the name of this setting only."""
    message = _find_difference(EQUAL_FACTS, {**EQUAL_FACTS, name: OTHER_FACTS[name]})
    assert message is not None
    assert message.startswith(f"The ranks are set up differently: {name} is ")
    assert [one for one in OTHER_FACTS if f"{one} is " in message] == [name]


def test_all_differing_settings_are_listed_with_values_by_rank() -> None:
    """All differences are listed with the values of each rank; every rank finds the same text."""
    other = {**EQUAL_FACTS, "speculation.method": "off", "rank_worker.kv_bits": "0"}
    message = _find_difference(EQUAL_FACTS, other, EQUAL_FACTS)
    assert message == (
        "The ranks are set up differently: speculation.method is draft_model on ranks 0, 2 and off "
        "on rank 1; rank_worker.kv_bits is 8 on ranks 0, 2 and 0 on rank 1. Give every rank the "
        "same Lockstep, model and settings."
    )
    facts = [EQUAL_FACTS, other, EQUAL_FACTS]
    rows = [agreement.encode_row(one) for one in facts]
    assert [agreement.find_difference(one, rows) for one in facts] == [message] * 3


def test_settings_of_any_length_are_encoded_as_equally_many_int32() -> None:
    """Settings of any length are encoded as the same number of int32, for one collective."""
    short = agreement.encode_row({"a": "", "b": "1"})
    long = agreement.encode_row({"a": "x" * 1_000, "b": "é" * 30})
    assert len(short) == len(long)
    assert all(-(2**31) <= number < 2**31 for number in short + long)


def test_long_setting_values_with_equal_start_count_as_different() -> None:
    """Long values are shortened in the message, but compared whole."""
    shown = "y" * agreement.SHOWN_BYTES
    facts = [{"a": f"{shown}{end}"} for end in "12"]
    message = agreement.find_difference(facts[0], [agreement.encode_row(one) for one in facts])
    assert message is not None
    assert f"a is {shown} on rank 0 and {shown} on rank 1" in message


def test_encoded_settings_with_one_changed_number_count_as_damaged() -> None:
    """Encoded settings that a wrong sum has changed count as damaged, not as other settings."""
    whole = agreement.encode_row(EQUAL_FACTS)
    for place in range(len(whole)):
        wrong = [*whole]
        wrong[place] ^= 1
        assert not agreement.rows_intact([whole, wrong])
