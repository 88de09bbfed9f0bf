"""Incremental decoding of token ids to text. Owns three decoders, one per kind of tokenizer.

A piece of text never ends inside a character, and all pieces together equal the text of decoding
all tokens at once.
"""

import codecs
from collections.abc import Callable, Mapping
from typing import Protocol

from services.gateway.tokenizing.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"
"""Replacement character that decoders write for bytes that are not valid UTF-8."""

WINDOW_TOKENS_MAX = 64
"""Longest run of tokens that `WindowDetokenizer` decodes again for each new token."""


class Detokenizer(Protocol):
    """Incremental decoder of one completion's token ids to text."""

    def add(self, token: int) -> str:
        """Add the next token id and return the text that later tokens cannot change, often ""."""
        ...

    def finish(self) -> str:
        """Return the rest of the text after the last token; an incomplete character is U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """Decoder for byte-level BPE: an incremental UTF-8 decoder reads the tokens' bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._texts = vocabulary.texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_in_character = False

    def add(self, token: int) -> str:
        """Add the next token id and return the characters that are complete now, often ""."""
        if token >= len(self._texts):
            return ""
        if not self._is_in_character:
            text = self._texts[token]
            if text is not None:
                return text
        text = self._decoder.decode(self._token_bytes[token])
        self._is_in_character = self._decoder.getstate()[0] != b""
        return text

    def finish(self) -> str:
        """Return U+FFFD for an incomplete character at the end, else ""."""
        self._is_in_character = False
        return self._decoder.decode(b"", True)


class ByteFallbackDetokenizer:
    """Decoder for SentencePiece vocabularies, whose byte tokens (`<0x0A>`) spell rare characters.

    It follows the rules of the tokenizers library: a run of byte tokens is text if all of it is
    UTF-8, else one U+FFFD per byte. So the run is held back until it ends.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._texts = vocabulary.texts
        self._byte_run = bytearray()
        self._must_strip = vocabulary.strips_first_space

    def add(self, token: int) -> str:
        """Add the next token id and return the text that later tokens cannot change.

        That is "" for byte tokens and special tokens; for another token it is the text of the byte
        tokens before it, if any, and its own.
        """
        if token >= len(self._texts):
            return ""
        text = self._texts[token]
        if text is None:
            self._byte_run += self._token_bytes[token]
            return ""
        if not text:
            return ""
        if self._byte_run:
            text = self._end_run() + text
        return self._stripped(text) if self._must_strip else text

    def finish(self) -> str:
        """Return the text of byte tokens at the completion's end, "" without any."""
        text = self._end_run()
        return self._stripped(text) if self._must_strip else text

    def _end_run(self) -> str:
        run = bytes(self._byte_run)
        self._byte_run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        if text:
            self._must_strip = False
        return text.removeprefix(" ")


class WindowDetokenizer:
    """Decoder for any other tokenizer: decodes a window of last tokens and returns new text.

    The window begins with tokens whose text was returned before, because the previous token decides
    whether the next one begins with a space.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], written: Mapping[int, str] | None = None
    ) -> None:
        """Begin without tokens.

        Args:
            decode: returns the text of a list of token ids, without special tokens.
            written: special tokens that are written out, with their texts; None: none are.
        """
        self._decode = decode
        self._written = written or {}
        self._window: list[int] = []
        self._sent_tokens = 0
        self._sent_text = ""

    def add(self, token: int) -> str:
        """Add the next token id and return the new text, "" if it may end inside a character."""
        if token in self._written:
            return self.finish() + self._written[token]
        self._window.append(token)
        is_full = len(self._window) - self._sent_tokens >= WINDOW_TOKENS_MAX
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and not is_full:
            return ""
        new = text[len(self._sent_text) :]
        if new or is_full:
            self._advance()
        return new

    def finish(self) -> str:
        """Return the text that was held back at the end, "" if none was."""
        new = self._decode(self._window)[len(self._sent_text) :]
        self._advance()
        return new

    def _advance(self) -> None:
        """Begin the window with the tokens that were just sent."""
        del self._window[: self._sent_tokens]
        self._sent_tokens = len(self._window)
        self._sent_text = self._decode(self._window)
