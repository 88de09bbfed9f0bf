"""Comparison of the tokenizers of a model and its draft model, by their files. Needs no MLX."""

import json
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
OTHER_TOKENIZER_FILES = (
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""Files of tokenizers without a `tokenizer.json`."""


def check_same_tokenizer(
    model_folder: Path, draft_folder: Path, draft_vocab_size: int | None
) -> None:
    """Compare the texts of all token ids in the model's and the draft model's tokenizer files.

    Without a `tokenizer.json` in both folders, other tokenizer files must have equal bytes.

    Args:
        model_folder: of the model.
        draft_folder: of the draft model.
        draft_vocab_size: vocabulary size in the draft model's config, padding included; None:
            unknown.

    Raises:
        ConfigError: a token id has different texts, files differ, or ids exceed the vocabulary
            size.
    """
    model_file, draft_file = model_folder / TOKENIZER_FILE, draft_folder / TOKENIZER_FILE
    if model_file.is_file() and draft_file.is_file():
        model_texts, draft_texts = _read_vocabulary(model_file), _read_vocabulary(draft_file)
        different = [
            token_id
            for token_id in model_texts.keys() | draft_texts.keys()
            if model_texts.get(token_id) != draft_texts.get(token_id)
        ]
        if different:
            first = min(different)
            raise _tokenizer_error(
                draft_folder,
                f"{len(different)} token ids differ, the first is {first}: "
                f"{_quote(model_texts.get(first))} in the model, "
                f"{_quote(draft_texts.get(first))} in the draft model",
            )
        if draft_vocab_size is not None and draft_vocab_size <= max(draft_texts, default=0):
            raise _tokenizer_error(
                draft_folder,
                f"its vocabulary has {draft_vocab_size} tokens, but its tokenizer has ids up to "
                f"{max(draft_texts)}",
            )
        return
    has_files = False
    for name in OTHER_TOKENIZER_FILES:
        content = _read_bytes(model_folder / name)
        if content != _read_bytes(draft_folder / name):
            raise _tokenizer_error(draft_folder, f"{name} differs")
        has_files = has_files or content is not None
    if not has_files:
        raise _tokenizer_error(draft_folder, f"not both folders hold a {TOKENIZER_FILE} to compare")


def _tokenizer_error(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"speculation.draft_model: the tokenizer of the draft model in {folder} differs from that "
        f"of the model ({reason}): choose a draft model of the same family."
    )


def _quote(text: str | None) -> str:
    return "missing" if text is None else json.dumps(text)


def _read_bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None


def _read_vocabulary(path: Path) -> dict[int, str]:
    """Return the text of each token id as the file spells it; raises ConfigError."""
    try:
        content: Any = json.loads(_read_bytes(path) or b"")
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            texts = {int(number): str(text) for text, number in vocabulary.items()}
        else:
            texts = {number: str(entry[0]) for number, entry in enumerate(vocabulary)}
        for added in content.get("added_tokens") or []:
            texts[int(added["id"])] = str(added["content"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise ConfigError(f"{path} does not describe a tokenizer: download it again.") from None
    return texts
