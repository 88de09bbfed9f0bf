"""Agreement of ranks on code, model and settings before they compute together."""

from typing import Any

import pytest

from services.rank_worker.joining import agreement

EQUAL_FACTS: dict[str, Any] = {
    "code": "0.1.0 0123456789ab",
    "fingerprint": "5e" * 16,
    "context_tokens_max": 8_192,
    "method": "draft_model",
    "draft_fingerprint": "a1" * 16,
    "kv_bits": 8,
}
OTHER_FACTS: dict[str, tuple[Any, str]] = {
    "code": ("0.1.0 0123456789ac", "lockstep"),
    "fingerprint": ("5e" * 15 + "5f", "model (path, dtype, files, versions of mlx and mlx-lm)"),
    "context_tokens_max": (4_096, "model.context_tokens_max"),
    "method": ("eagle", "speculation.method"),
    "draft_fingerprint": ("", "speculation.draft_model"),
    "kv_bits": (0, "rank_worker.kv_bits"),
}


def _find_difference(*sets: dict[str, Any]) -> str | None:
    """Return the difference that the last of several ranks finds."""
    facts = [agreement.load_facts(**one) for one in sets]
    rows = [agreement.encode_row(one) for one in facts]
    assert agreement.rows_intact(rows)
    return agreement.find_difference(facts[-1], rows)


def test_equal_ranks_agree() -> None:
    """Ranks with equal settings find no difference."""
    assert _find_difference(EQUAL_FACTS) is None
    assert _find_difference(*[EQUAL_FACTS] * 5) is None


@pytest.mark.parametrize("field", list(OTHER_FACTS))
def test_differing_setting_is_named(field: str) -> None:
    """A rank that differs in one setting is refused with the name of this setting."""
    value, name = OTHER_FACTS[field]
    message = _find_difference(EQUAL_FACTS, {**EQUAL_FACTS, field: value})
    assert message is not None
    assert message.startswith(f"The ranks are set up differently: {name} is ")
    assert [one for _, one in OTHER_FACTS.values() if one in message] == [name]


def test_all_differences_are_listed_by_rank() -> None:
    """All differences are listed with the values of each rank; every rank finds the same text."""
    other = {**EQUAL_FACTS, "method": "off", "kv_bits": 0}
    message = _find_difference(EQUAL_FACTS, other, EQUAL_FACTS)
    assert message == (
        "The ranks are set up differently: speculation.method is draft_model on ranks 0, 2 and off "
        "on rank 1; rank_worker.kv_bits is 8 on ranks 0, 2 and 0 on rank 1. Give every rank the "
        "same Lockstep, model and settings."
    )
    facts = [agreement.load_facts(**one) for one in (EQUAL_FACTS, other, EQUAL_FACTS)]
    rows = [agreement.encode_row(one) for one in facts]
    assert [agreement.find_difference(one, rows) for one in facts] == [message] * 3


def test_settings_are_encoded_as_equally_many_int32() -> None:
    """Settings of any length are encoded as the same number of int32, for one collective."""
    short = agreement.encode_row({"a": "", "b": "1"})
    long = agreement.encode_row({"a": "x" * 1_000, "b": "é" * 30})
    assert len(short) == len(long)
    assert all(-(2**31) <= number < 2**31 for number in short + long)


def test_long_values_with_equal_start_differ() -> None:
    """Long values are shortened in the message, but compared whole."""
    shown = "y" * agreement.SHOWN_BYTES
    facts = [{"a": f"{shown}{end}"} for end in "12"]
    message = agreement.find_difference(facts[0], [agreement.encode_row(one) for one in facts])
    assert message is not None
    assert f"a is {shown} on rank 0 and {shown} on rank 1" in message


def test_corrupted_row_is_not_intact() -> None:
    """A row changed by a wrong sum is detected and not taken for other settings."""
    facts = agreement.load_facts(**EQUAL_FACTS)
    whole = agreement.encode_row(facts)
    for place in range(len(whole)):
        wrong = [*whole]
        wrong[place] ^= 1
        assert not agreement.rows_intact([whole, wrong])
