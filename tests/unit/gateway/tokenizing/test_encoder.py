"""Encoding of conversations: as the tokenizer does, but text cannot become special tokens."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from services.gateway.http.errors import ApiError
from services.gateway.tokenizing import encoder as encoder_module
from services.gateway.tokenizing.encoder import Encoder
from tests.support.effort import cases
from tests.unit.gateway.tokenizing import small_tokenizers

_START, _END = "<|im_start|>", "<|im_end|>"


def _render(messages: Any) -> str:
    return "".join(f"{_START}user\n{message['content']}{_END}\n" for message in messages)


def _encode(content: str, backend: Tokenizer | None = None) -> list[int]:
    encoder = Encoder(backend or small_tokenizers.byte_level())
    return encoder.encode_conversation([{"role": "user", "content": content}], _render).ids


@settings(max_examples=cases(40, 200))
@given(content=st.text(max_size=60).filter(lambda text: "<|" not in text))
def test_encoder_and_tokenizer_give_equal_ids_for_text_without_special_tokens(content: str) -> None:
    """Text without special tokens gets the ids that the tokenizer gives the rendered text."""
    backend = small_tokenizers.byte_level()
    rendered = _render([{"content": content}])
    assert _encode(content) == backend.encode(rendered, add_special_tokens=False).ids


_special_fragments = st.lists(
    st.sampled_from([_START, _END, "<|endoftext|>", "<|im_", "start|>", "\ufdd0", "x", "\n", "<"]),
    max_size=10,
).map("".join)


@settings(max_examples=cases(60, 300))
@given(content=_special_fragments)
def test_special_token_written_by_client_is_encoded_as_text(content: str) -> None:
    """For any nesting and cutting, the only special tokens are the template's two."""
    backend = small_tokenizers.byte_level()
    ids = _encode(content)
    special = [backend.token_to_id(name) for name in (_START, _END, "<|endoftext|>")]
    assert [token for token in ids if token in special] == special[:2]
    assert backend.decode(ids, skip_special_tokens=False) == _render([{"content": content}])


def test_special_token_in_nested_fields_is_encoded_as_text() -> None:
    """Keys and values of nested fields are text of the client too."""

    def render(fields: Any) -> str:
        return f"{_START}{fields[0]['tool']}{next(iter(fields[1]))}{_END}"

    backend = small_tokenizers.byte_level()
    ids = Encoder(backend).encode_conversation([{"tool": _END}, {_START: 1}], render).ids
    special = [token for token in ids if backend.id_to_token(token) in (_START, _END)]
    assert special == [backend.token_to_id(_START), backend.token_to_id(_END)]


def test_text_that_normalizes_to_special_token_is_encoded_as_text() -> None:
    """Full-width letters that a normalizer turns into a special token stay text."""
    backend = Tokenizer.from_str(small_tokenizers.byte_level().to_str())
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([AddedToken("<|call|>", normalized=True, special=True)])
    call = backend.token_to_id("<|call|>")
    content = "\uff1c\uff5ccall\uff5c\uff1e"
    assert call in backend.encode(content).ids
    assert call not in _encode(content, backend)


def test_encoder_refuses_text_that_contains_every_unicode_noncharacter() -> None:
    """Without a free noncharacter as a mark the request is refused."""
    marks = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))
    with pytest.raises(ApiError, match="noncharacters"):
        _encode(_START + marks)


_rendered = st.lists(
    st.sampled_from([_START, _END, "user", "\n", "  ", " two", "x", "x", "One two three", "漢"]),
    max_size=12,
).map("".join)


@settings(max_examples=cases(100, 500))
@given(shared=_rendered, one=_rendered, other=_rendered)
def test_shared_token_count_of_two_texts_equals_count_by_full_encoding(
    shared: str, one: str, other: str
) -> None:
    """The count is exact for texts that diverge in a word, white space or a special token."""
    conversation = Encoder(small_tokenizers.byte_level()).encode_conversation(
        ["client"], lambda _: shared + one
    )
    whole = small_tokenizers.byte_level().encode(shared + other, add_special_tokens=False).ids
    count = 0
    for left, right in zip(conversation.ids, whole, strict=False):
        if left != right:
            break
        count += 1
    assert conversation.count_shared_tokens(["client"], lambda _: shared + other) == count


def test_shared_token_count_excludes_token_of_word_that_continues_differently() -> None:
    """Text after the divergence counts: a longer word may have other tokens."""
    encoder = Encoder(small_tokenizers.byte_level())
    conversation = encoder.encode_conversation([], lambda _: f"{_START}one two thr")
    assert conversation.count_shared_tokens([], lambda _: f"{_START}one two three") < len(
        conversation.ids
    )


@settings(max_examples=cases(60, 300))
@given(content=_special_fragments, size=st.integers(1, 12))
def test_search_for_special_tokens_in_pieces_finds_all_of_them(content: str, size: int) -> None:
    """A special token may lie across the end of a piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_module, "SEARCH_CHARS", size)
        in_pieces = _encode(content)
    assert in_pieces == _encode(content)
