"""What ranks compare before they compute together: rows of one length, and a sentence."""

from typing import Any

import pytest

from services.rank_worker.joining import agreement

LIKE: dict[str, Any] = {
    "code": "0.1.0 0123456789ab",
    "fingerprint": "5e" * 16,
    "context_tokens_max": 8_192,
    "method": "draft_model",
    "draft_fingerprint": "a1" * 16,
    "kv_bits": 8,
}
OTHERWISE: dict[str, tuple[Any, str]] = {
    "code": ("0.1.0 0123456789ac", "lockstep"),
    "fingerprint": ("5e" * 15 + "5f", "model (path, dtype, files, versions of mlx and mlx-lm)"),
    "context_tokens_max": (4_096, "model.context_tokens_max"),
    "method": ("eagle", "speculation.method"),
    "draft_fingerprint": ("", "speculation.draft_model"),
    "kv_bits": (0, "rank_worker.kv_bits"),
}


def _difference(*sets: dict[str, Any]) -> str | None:
    """Return what the last of several ranks says."""
    facts = [agreement.load_facts(**one) for one in sets]
    rows = [agreement.encode_row(one) for one in facts]
    assert agreement.rows_intact(rows)
    return agreement.find_difference(facts[-1], rows)


def test_alike_ranks_agree() -> None:
    """However many, nothing differs."""
    assert _difference(LIKE) is None
    assert _difference(*[LIKE] * 5) is None


@pytest.mark.parametrize("field", list(OTHERWISE))
def test_each_setting_is_named_alone(field: str) -> None:
    """Nothing that decides collectives is left out, be it the last digit of a fingerprint."""
    value, name = OTHERWISE[field]
    said = _difference(LIKE, {**LIKE, field: value})
    assert said is not None
    assert said.startswith(f"The ranks are set up differently: {name} is ")
    assert [one for _, one in OTHERWISE.values() if one in said] == [name]


def test_values_are_shown_by_rank() -> None:
    """Who has which, all that differs in one sentence, and what to do; every rank says the same."""
    other = {**LIKE, "method": "off", "kv_bits": 0}
    said = _difference(LIKE, other, LIKE)
    assert said == (
        "The ranks are set up differently: speculation.method is draft_model on ranks 0, 2 and off "
        "on rank 1; rank_worker.kv_bits is 8 on ranks 0, 2 and 0 on rank 1. Give every rank the "
        "same Lockstep, model and settings."
    )
    facts = [agreement.load_facts(**one) for one in (LIKE, other, LIKE)]
    rows = [agreement.encode_row(one) for one in facts]
    assert [agreement.find_difference(one, rows) for one in facts] == [said] * 3


def test_rows_are_numbers_of_one_count() -> None:
    """One collective carries any values: int32, as many for an empty text as for a long one."""
    short = agreement.encode_row({"a": "", "b": "1"})
    long = agreement.encode_row({"a": "x" * 1_000, "b": "é" * 30})
    assert len(short) == len(long)
    assert all(-(2**31) <= number < 2**31 for number in short + long)


def test_long_values_that_begin_alike_differ() -> None:
    """What is shown is cut; what is compared is not."""
    shown = "y" * agreement.SHOWN_BYTES
    facts = [{"a": f"{shown}{end}"} for end in "12"]
    said = agreement.find_difference(facts[0], [agreement.encode_row(one) for one in facts])
    assert said is not None
    assert f"a is {shown} on rank 0 and {shown} on rank 1" in said


def test_rows_that_were_added_up_wrongly_are_no_settings() -> None:
    """A wrong sum is not taken for another setting, wherever it is wrong."""
    facts = agreement.load_facts(**LIKE)
    whole = agreement.encode_row(facts)
    for place in range(len(whole)):
        wrong = [*whole]
        wrong[place] ^= 1
        assert not agreement.rows_intact([whole, wrong])
