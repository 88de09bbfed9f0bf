"""Table of a tokenizer's tokens: their bytes and their text. Owns recognizing the decoder's kind.

Two kinds of decoders have exact tables: byte-level BPE (GPT-2, Llama 3, Qwen, ...) and pieces with
byte fallback (SentencePiece's BPE: Llama 2, Mistral, Gemma). All others are of kind "other".
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

from tokenizers import Tokenizer as Backend

Kind = Literal["byte_level", "byte_fallback", "other"]

PIECE_SPACE = "▁"
"""Character that SentencePiece writes for a space."""
_BYTE_TOKEN = re.compile("<0x([0-9a-fA-F]{2})>")


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """Bytes and text of each token id, in lists of equal length; larger ids have no token."""

    kind: Kind
    """Kind of the tokenizer's decoder, as in this module's docstring."""
    token_bytes: list[bytes]
    """The bytes of each token, b"" for special tokens and unused ids, which never become text."""
    texts: list[str | None]
    """The token as text, None when it is not complete characters. Makes most decoding a lookup."""
    strips_first_space: bool
    """The decoder removes one space at the start of a text."""
    written: dict[int, str] = dataclasses.field(default_factory=dict)
    """Special tokens that are written out, with their texts; the others become no text."""

    @property
    def token_bytes_max(self) -> int:
        """Length in bytes of the token with the most bytes."""
        return max(map(len, self.token_bytes), default=0)


def read(backend: Backend) -> Vocabulary:
    """Return the bytes and text of all token ids of a tokenizer.

    Args:
        backend: the tokenizer; its decoder decides how a vocabulary entry is turned into bytes.
    """
    state = json.loads(backend.to_str())
    kind, strips_first_space = _kind(state.get("decoder"))
    special = {token["id"] for token in state["added_tokens"] if token["special"]}
    pieces = backend.get_vocab(with_added_tokens=True)
    token_bytes = [b""] * (max(pieces.values(), default=-1) + 1)
    texts: list[str | None] = [""] * len(token_bytes)
    for piece, number in pieces.items():
        if number in special:
            continue
        data = _BYTES_OF[kind](piece)
        token_bytes[number] = data
        is_byte = kind == "byte_fallback" and _BYTE_TOKEN.fullmatch(piece)
        texts[number] = None if is_byte else _text(data)
    return Vocabulary(kind, token_bytes, texts, strips_first_space)


def with_special_texts(known: Vocabulary, backend: Backend, texts: Iterable[str]) -> Vocabulary:
    """Return a vocabulary in which some special tokens are text.

    Args:
        known: the vocabulary without them.
        backend: its tokenizer.
        texts: texts of tokens that are written out, if they are special tokens.
    """
    written: dict[int, str] = {}
    for text in texts:
        token = backend.token_to_id(text)
        if token is not None and not known.token_bytes[token]:
            written[token] = text
    if not written:
        return known
    token_bytes, all_texts = list(known.token_bytes), list(known.texts)
    for token, text in written.items():
        token_bytes[token], all_texts[token] = text.encode(), text
    return dataclasses.replace(known, token_bytes=token_bytes, texts=all_texts, written=written)


def _kind(decoder: dict[str, Any] | None) -> tuple[Kind, bool]:
    if decoder is None:
        return "other", False
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return "byte_level", False
    replace = {"type": "Replace", "pattern": {"String": PIECE_SPACE}, "content": " "}
    beginning = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if steps in (beginning, [*beginning, strip]):
        return "byte_fallback", len(steps) > len(beginning)
    return "other", False


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table of byte characters: printable bytes, then others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        # An added token with characters outside the alphabet stands for its own text.
        return piece.encode()


def _byte_fallback(piece: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace(PIECE_SPACE, " ").encode()


_BYTES_OF: dict[Kind, Callable[[str], bytes]] = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "other": str.encode,
}


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
