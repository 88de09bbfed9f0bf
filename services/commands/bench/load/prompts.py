"""Prompts of an exact length, each with a different first token, so that none hits a prefix cache.

Owns prompts made of random words; does not send them.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from shared.errors import UsageError


class PromptGenerator:
    """Generates prompts from words of one token each; equal seeds and calls give equal prompts.

    Successive prompts begin with different words until each word has been first once.
    """

    def __init__(self, folder: Path, seed: int = 1) -> None:
        """Read the tokenizer of the model in `folder`.

        Raises:
            UsageError: when the folder has no tokenizer or the tokenizer too few whole words.
        """
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UsageError(f"{folder} holds no tokenizer.json: give a model folder that has one.")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._words = whole_words(self._tokenizer)
        if len(self._words) < 256:
            raise UsageError(f"The tokenizer in {folder} has only {len(self._words)} whole words.")
        self._random = Random(seed)
        self._firsts = self._first_tokens()

    def token_prompt(self, length: int) -> list[int]:
        """Return a prompt of `length` token ids; its first id differs from those of recent ones."""
        others = self._random.choices(self._words, k=length - 1)
        return [next(self._firsts), *(token for token, _ in others)]

    def token_work(self, clients: int, rounds: int, length: int) -> list[list[list[int]]]:
        """Return new prompts for a load.

        Args:
            clients: number of clients.
            rounds: prompts of each client, which it sends one after the other.
            length: tokens of each prompt.

        Returns:
            Per client its prompts (token ids).
        """
        return [[self.token_prompt(length) for _ in range(rounds)] for _ in range(clients)]

    def text_prompt(self, length: int) -> str:
        """Return a text that the tokenizer encodes to exactly `length` tokens.

        Raises:
            UsageError: when no such text was found; some tokenizers merge tokens across words.
        """
        first = next(self._firsts)
        word = dict(self._words)[first]
        for _ in range(50):
            rest = "".join(text for _, text in self._random.choices(self._words, k=length - 1))
            text = word + rest
            if len(self._tokenizer.encode(text).ids) == length:
                return text
        raise UsageError(f"No text of exactly {length} tokens found for this tokenizer.")

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._tokenizer.encode(text).ids)

    def marked_words(self) -> tuple[str, list[int]]:
        """Return a letter, and the ids of tokens whose texts contain it exactly once.

        In a text of such tokens, the number of these letters is the number of tokens.

        Raises:
            UsageError: when the tokenizer has fewer than 32 such tokens for every letter tried.
        """
        for letter in "zqjwv":
            tokens = [token for token, text in self._words if text.count(letter) == 1]
            if len(tokens) >= 32:
                return letter, tokens
        raise UsageError("The tokenizer has no letter that enough words contain exactly once.")

    def _first_tokens(self) -> Iterator[int]:
        """Yield each word's token once in random order, and then begin again."""
        while True:
            order = [token for token, _ in self._words]
            self._random.shuffle(order)
            yield from order


def whole_words(tokenizer: Any) -> list[tuple[int, str]]:
    """Return (id, text) of each token that is a space and 2 or more ASCII letters."""
    found = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        letters = text[1:]
        is_word = text.startswith(" ") and len(letters) >= 2 and letters.isascii()
        if is_word and letters.isalpha() and _encodes_to(tokenizer, text, token):
            found.append((token, text))
    return found


def _encodes_to(tokenizer: Any, text: str, token: int) -> bool:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids == [token]
