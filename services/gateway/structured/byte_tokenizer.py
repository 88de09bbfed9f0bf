"""Tokenizer of single bytes and the model's special tokens, with which grammars are checked.

It stands in for the model's own, which takes seconds to read and holds Python's interpreter lock
for that time.
"""

import dataclasses
from collections.abc import Sequence

from shared.model.grammars import special_name

_SPECIAL_PREFIX = b"\xff"
"""llguidance's mark of special tokens; no text has this byte."""
_BYTES = 256


@dataclasses.dataclass
class ByteTokenizer:
    """One token for each byte, and the model's special tokens under their own ids."""

    special_ids: Sequence[int]
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        size = max([*self.special_ids, -1]) + 1
        self.eos_token_id = size + _BYTES
        self.tokens = [b""] * size + [bytes([byte]) for byte in range(_BYTES)] + [b"<end>"]
        for token in self.special_ids:
            self.tokens[token] = _SPECIAL_PREFIX + special_name(token).encode()
        self.special_token_ids = [*self.special_ids, self.eos_token_id]
        self._first_byte = size

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text."""
        data = text if isinstance(text, bytes) else text.encode()
        return [self._first_byte + byte for byte in data]
