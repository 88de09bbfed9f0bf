"""Prompts that fill in the middle of a text. Owns the names and the order of a model's markers."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

_LAYOUTS = (
    # Qwen Coder, CodeGemma, Granite 4
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", False),
    # StarCoder, Granite Code
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", False),
    # SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", False),
    # DeepSeek
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", False),  # noqa: RUF001 - their own bars
    # CodeLlama
    ("▁<PRE>", "▁<SUF>", "▁<MID>", False),
    # Seed-Coder
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", True),
    # Codestral, whose completion follows the prefix directly
    ("[PREFIX]", "[SUFFIX]", "", True),
)
"""Markers before the prefix, before the suffix and before the completion, and whether the suffix
comes first."""

_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>",
    "<fim_pad>", "<file_sep>", "▁<EOT>",
)  # fmt: skip
"""Tokens that end a middle, beside those that end every completion."""


@dataclasses.dataclass(frozen=True, slots=True)
class Infill:
    """A model's marker tokens for filling in the middle of a text."""

    prefix: int
    """Marker before the text that comes first."""
    suffix: int
    """Marker before the text that comes last."""
    middle: Sequence[int]
    """Marker before the completion; [] for models without one."""
    is_suffix_first: bool
    """The suffix stands before the prefix in the prompt."""
    stop_ids: list[int]
    """Token ids that end a completion, beside those of the model."""

    @classmethod
    def find(cls, backend: Any) -> Self | None:
        """Return the markers of a tokenizer; None if its model has none.

        Args:
            backend: the tokenizer of the library `tokenizers`.
        """
        for *names, is_suffix_first in _LAYOUTS:
            ids = [backend.token_to_id(name) for name in names if name]
            if None not in ids:
                found = {backend.token_to_id(name) for name in _ENDS} - {None}
                prefix, suffix, *middle = ids
                return cls(prefix, suffix, middle, is_suffix_first, sorted({*found, *ids}))
        return None

    def arrange(
        self, begin: Sequence[int], before: Sequence[int], after: Sequence[int]
    ) -> list[int]:
        """Return the prompt whose completion belongs between two texts.

        Args:
            begin: token ids at the beginning of every prompt.
            before: token ids of the text before the completion.
            after: token ids of the text after it.
        """
        first, second = [self.prefix, *before], [self.suffix, *after]
        if self.is_suffix_first:
            first, second = second, first
        return [*begin, *first, *second, *self.middle]
