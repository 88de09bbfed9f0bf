"""Tokenizers of grammars: which tokens may be text, special ones among them."""

import json
import random
from pathlib import Path
from typing import Any

import llguidance.numpy
import pytest
from llguidance import LLMatcher, LLTokenizer

from shared.model.grammars import compile_grammar, read_tokenizer

_TAG = 300


def _token(number: int, text: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": text, "special": special, **flags}


def _tokenizer(folder: Path, *, tag_in_vocabulary: bool) -> LLTokenizer:
    """Read a byte-level tokenizer whose `<tool_call>` is one token that is not flagged."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    vocabulary = {letters[byte]: byte for byte in range(256)}
    vocabulary |= {f"unused{number}": number for number in range(256, _TAG)}
    if tag_in_vocabulary:
        vocabulary["<tool_call>"] = _TAG
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    content = {
        "version": "1.0",
        "added_tokens": [_token(_TAG, "<tool_call>", special=False)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return read_tokenizer(folder)


def _allowed(matcher: LLMatcher, tokenizer: LLTokenizer) -> list[int]:
    bits = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
    llguidance.numpy.fill_next_token_bitmask(matcher, bits)
    return [n for n in range(tokenizer.vocab_size) if bits[0][n // 32] >> (n % 32) & 1]


@pytest.mark.parametrize("tag_in_vocabulary", [False, True])
def test_text_of_a_tag_is_matched_by_other_tokens_when_the_tag_is_one_token(
    tmp_path: Path, tag_in_vocabulary: bool
) -> None:
    """Text of a client that looks like a special token is text, and the mask allows it."""
    tokenizer = _tokenizer(tmp_path, tag_in_vocabulary=tag_in_vocabulary)
    matcher = compile_grammar(tokenizer, 'start: "<tool_call>" "x"')
    written = b""
    for _ in range(len("<tool_call>x")):
        [token] = _allowed(matcher, tokenizer)
        assert matcher.consume_token(token), matcher.get_error()
        written += tokenizer.decode_bytes([token])
    assert written == b"<tool_call>x"


@pytest.mark.parametrize("tag_in_vocabulary", [False, True])
def test_token_of_a_tag_is_matched_by_its_id_only(tmp_path: Path, tag_in_vocabulary: bool) -> None:
    """A format's marker is one token, as the model was trained; free text never has it."""
    tokenizer = _tokenizer(tmp_path, tag_in_vocabulary=tag_in_vocabulary)
    matcher = compile_grammar(tokenizer, f'start: <[{_TAG}]> "x"')
    assert _allowed(matcher, tokenizer) == [_TAG]
    assert matcher.consume_token(_TAG)
    text = compile_grammar(tokenizer, "start: /(.|\\n)*/")
    assert _TAG not in _allowed(text, tokenizer)


def test_regular_expression_with_too_many_states_ends_its_own_matcher(tmp_path: Path) -> None:
    """Before its automaton, of which every sequence has one, takes the memory of a rank."""
    tokenizer = _tokenizer(tmp_path, tag_in_vocabulary=False)
    matcher = compile_grammar(tokenizer, r"start: /.*[a-m].{14}.*[n-z].{14}/")
    chance = random.Random(1)
    for _ in range(20_000):
        matcher.compute_bitmask()
        if matcher.is_error():
            break
        matcher.consume_token(chance.randrange(ord("a"), ord("z") + 1))
    assert "too many states" in matcher.get_error()
