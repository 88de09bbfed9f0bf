"""Detokenizing token by token: no text is lost, and no character is split."""

import itertools
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.gateway.tokenizing import vocabulary
from services.gateway.tokenizing.detokenizer import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)
from tests.support.effort import cases
from tests.unit.gateway.tokenizing import chat_templates, small_tokenizers

_KINDS = ["byte_level", "byte_fallback", "byte_fallback_unstripped", "other"]


def _backend(kind: str) -> Tokenizer:
    if kind == "byte_level":
        return small_tokenizers.byte_level()
    if kind == "other":
        return small_tokenizers.metaspace()
    return small_tokenizers.byte_fallback(strips=kind == "byte_fallback")


def _detokenizer(backend: Tokenizer) -> Detokenizer:
    known = vocabulary.read(backend)
    if known.kind == "byte_level":
        return ByteLevelDetokenizer(known)
    if known.kind == "byte_fallback":
        return ByteFallbackDetokenizer(known)
    return WindowDetokenizer(backend.decode)


def _all_pieces(backend: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = _detokenizer(backend)
    return [*map(detokenizer.add, tokens), detokenizer.finish()]


@pytest.mark.parametrize("kind", _KINDS)
@settings(max_examples=cases(60, 300))
@given(text=st.text(max_size=60))
def test_detokenized_pieces_of_any_text_join_to_decoded_text(kind: str, text: str) -> None:
    """For any Unicode text the joined pieces equal `decode` of all tokens."""
    backend = _backend(kind)
    tokens = backend.encode(text).ids
    assert "".join(_all_pieces(backend, tokens)) == backend.decode(tokens)


@pytest.mark.parametrize("kind", _KINDS)
@settings(max_examples=cases(100, 500))
@given(data=st.data())
def test_detokenized_pieces_of_any_token_ids_join_to_decoded_text(
    kind: str, data: st.DataObject
) -> None:
    """For any token ids, also broken characters, special and unknown ids."""
    backend = _backend(kind)
    ids = st.integers(0, backend.get_vocab_size() + 3)
    tokens = data.draw(st.lists(ids, max_size=40))
    assert "".join(_all_pieces(backend, tokens)) == backend.decode(tokens)


@settings(max_examples=cases(40, 200))
@given(text=st.text(min_size=1, max_size=40))
def test_detokenized_piece_never_contains_part_of_character(text: str) -> None:
    """U+FFFD appears only if the text contains it."""
    backend = small_tokenizers.byte_level()
    pieces = _all_pieces(backend, backend.encode(text, add_special_tokens=False).ids)
    assert ("\ufffd" in "".join(pieces)) == ("\ufffd" in text)


def test_character_of_several_tokens_is_emitted_with_its_last_token() -> None:
    """Three tokens of an emoji give no text, the fourth gives the emoji."""
    backend = small_tokenizers.byte_fallback(strips=False)
    ids = backend.get_vocab()
    tokens = [ids[f"<0x{byte:02X}>"] for byte in "🦊".encode()]
    detokenizer = _detokenizer(backend)
    pieces = [detokenizer.add(token) for token in [*tokens, ids["a"]]]
    assert pieces == ["", "", "", "", "🦊a"]
    table = vocabulary.read(small_tokenizers.byte_level())
    by_bytes = {data: token for token, data in enumerate(table.token_bytes) if len(data) == 1}
    level = ByteLevelDetokenizer(table)
    assert [level.add(by_bytes[bytes([byte])]) for byte in "🦊".encode()] == ["", "", "", "🦊"]


def test_incomplete_character_becomes_replacement_character_when_completion_ends() -> None:
    """A completion cut inside a character ends with one U+FFFD, as `decode` gives."""
    table = vocabulary.read(small_tokenizers.byte_level())
    by_bytes = {data: token for token, data in enumerate(table.token_bytes) if len(data) == 1}
    level = ByteLevelDetokenizer(table)
    assert [level.add(by_bytes[bytes([byte])]) for byte in "🦊".encode()[:3]] == ["", "", ""]
    assert level.finish() == "\ufffd"


def test_detokenizer_window_stays_bounded_while_tokens_give_no_text() -> None:
    """The cost per token stays bounded, also for thousands of tokens without text."""
    longest = 0

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return "x" * sum(token == 1 for token in tokens)

    detokenizer = WindowDetokenizer(decode)
    text = "".join(detokenizer.add(token) for token in [0] * 1_000 + [1] + [0] * 500)
    assert text + detokenizer.finish() == "x"
    assert longest <= 200


def test_tokenizer_decoder_is_recognised_as_byte_level_byte_fallback_or_other() -> None:
    """The exact detokenizers are used only for decoders that they support."""
    assert [vocabulary.read(_backend(kind)).kind for kind in _KINDS] == [
        "byte_level",
        "byte_fallback",
        "byte_fallback",
        "other",
    ]


def test_detokenizing_100000_tokens_takes_less_than_2_cpu_seconds() -> None:
    """100,000 tokens take less than 2 s of CPU time."""
    backend = small_tokenizers.byte_level()
    tokens = backend.encode("The scheduler decides, 漢字 and 🎉. ").ids
    detokenizer = _detokenizer(backend)
    start = time.process_time()
    for _ in range(100_000 // len(tokens)):
        for token in tokens:
            detokenizer.add(token)
    assert time.process_time() - start < 2.0


def test_other_threads_run_while_many_tokens_are_decoded() -> None:
    """Decoding as many tokens as a request may have does not stop the event loop."""
    tokenizer = chat_templates.tokenizer(chat_templates.PLAIN_TURNS)
    tokens = tokenizer.encode_text("The scheduler decides. ") * 30_000
    times_s: list[float] = []
    is_decoded = threading.Event()

    def record_times() -> None:
        while not is_decoded.wait(0.001):
            times_s.append(time.monotonic())

    thread = threading.Thread(target=record_times)
    thread.start()
    start_s = time.monotonic()
    text = tokenizer.decode_whole(tokens)
    end_s = time.monotonic()
    is_decoded.set()
    thread.join()
    assert text == "The scheduler decides. " * 30_000
    within_s = [start_s, *(time_s for time_s in times_s if start_s < time_s < end_s), end_s]
    longest_s = max(later - earlier for earlier, later in itertools.pairwise(within_s))
    assert longest_s < 0.6 * (end_s - start_s)


@pytest.mark.parametrize("kind", _KINDS)
def test_special_tokens_that_a_parser_needs_are_written_out_and_the_others_are_not(
    kind: str,
) -> None:
    """A marker between two texts is text, also after half a character; other special tokens not."""
    backend = _backend(kind)
    backend.add_special_tokens(["<|call|>", "<|other|>"])
    table = vocabulary.with_special_texts(
        vocabulary.read(backend), backend, ["<|call|>", "a", "<unknown>"]
    )
    tokens = backend.encode("one two", add_special_tokens=False).ids
    ids = backend.get_vocab()
    marker, other = ids["<|call|>"], ids["<|other|>"]
    detokenizer: Detokenizer
    match table.kind:
        case "byte_level":
            detokenizer = ByteLevelDetokenizer(table)
        case "byte_fallback":
            detokenizer = ByteFallbackDetokenizer(table)
        case "other":
            detokenizer = WindowDetokenizer(backend.decode, table.written)

    text = "".join(map(detokenizer.add, [*tokens, marker, other, *tokens, marker]))

    assert (text + detokenizer.finish()).split("<|call|>")[0].strip() == "one two"
    assert text.split("<|call|>")[1].strip() == "one two"
    assert text.endswith("<|call|>")
    assert table.written == {marker: "<|call|>"}
