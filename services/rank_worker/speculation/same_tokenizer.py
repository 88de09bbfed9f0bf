"""Whether a draft model speaks of the same tokens, told by the tokenizers' files. No MLX."""

import json
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

MODERN = "tokenizer.json"
OTHERS = (
    "tokenizer.model",
    "tiktoken.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""What stands for a tokenizer where there is no `tokenizer.json`."""


def check_same_tokenizer(
    model_folder: Path, draft_folder: Path, draft_vocab_size: int | None
) -> None:
    """Refuse a draft model whose token ids mean other texts.

    Args:
        model_folder: of the model that is served.
        draft_folder: of the draft model.
        draft_vocab_size: tokens that its config says it knows, padding among them.

    Raises:
        ConfigError: names what differs.
    """
    ours, theirs = model_folder / MODERN, draft_folder / MODERN
    if ours.is_file() and theirs.is_file():
        texts, drafts = _texts(ours), _texts(theirs)
        different = [
            one for one in texts.keys() | drafts.keys() if texts.get(one) != drafts.get(one)
        ]
        if different:
            first = min(different)
            raise _refused(
                draft_folder,
                f"{len(different)} token ids differ, the first is {first}, here "
                f"{_said(texts.get(first))}, there {_said(drafts.get(first))}",
            )
        if draft_vocab_size is not None and draft_vocab_size <= max(drafts, default=0):
            raise _refused(
                draft_folder,
                f"it knows {draft_vocab_size} tokens, the tokenizer has ids up to {max(drafts)}",
            )
        return
    names = [
        name for name in OTHERS if (model_folder / name).exists() or (draft_folder / name).exists()
    ]
    for name in names:
        if _bytes(model_folder / name) != _bytes(draft_folder / name):
            raise _refused(draft_folder, f"{name} differs")
    if not names:
        raise _refused(draft_folder, f"there is no {MODERN} in both folders to compare")


def _refused(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"speculation.draft_model: the model in {folder} has another tokenizer than the model it "
        f"is to draft for ({why}): choose one of the same family."
    )


def _said(text: str | None) -> str:
    return "missing" if text is None else json.dumps(text)


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None


def _texts(path: Path) -> dict[int, str]:
    """Return what each id stands for, as the file writes it."""
    try:
        content: Any = json.loads(_bytes(path) or b"")
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            texts = {int(number): str(text) for text, number in vocabulary.items()}
        else:
            texts = {number: str(entry[0]) for number, entry in enumerate(vocabulary)}
        for added in content.get("added_tokens") or []:
            texts[int(added["id"])] = str(added["content"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise ConfigError(f"{path} describes no tokenizer.") from None
    return texts
