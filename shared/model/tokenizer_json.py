"""The content of a model's tokenizer.json, built where its folder has other tokenizer files.

Two formats of byte-level BPE are converted, without the code that models bring for them:
`tiktoken.model` of Moonshot's models (Kimi, Moonlight) and `tekken.json` of Mistral's. Both list
tokens by rank: of all neighbouring parts of a text, the two whose joined bytes have the lowest rank
are joined first.
"""

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

FILE = "tokenizer.json"
TIKTOKEN_FILE = "tiktoken.model"
TEKKEN_FILE = "tekken.json"

_KIMI_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_KIMI_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_KIMI_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Regular expression by which Kimi's tokenizer cuts a text before it joins bytes."""
_KIMI_CLASS = "TikTokenTokenizer"
_KIMI_ADDED_TOKENS = 256
"""Token ids after the ranks, whether tokenizer_config.json names them or not."""

_OLD_TEKKEN_NAMES = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""First special tokens of a tekken.json that does not list them."""


def read(folder: Path) -> str | None:
    """Return the JSON text of a model's tokenizer.json, or of one built from its other files.

    None when the folder has none of the three files that this module reads. Building takes about
    two seconds for 160,000 tokens.

    Raises:
        ConfigError: when a file cannot be read or is damaged, or the tokenizer is not known.
    """
    try:
        if (folder / FILE).is_file():
            return (folder / FILE).read_text(encoding="utf-8")
        return build(folder)
    except OSError as error:
        raise ConfigError(f"Cannot read the tokenizer in {folder}: {error}.") from None


def is_there(folder: Path) -> bool:
    """Return whether `read` has a text for a model's folder."""
    return any((folder / name).is_file() for name in (FILE, TIKTOKEN_FILE, TEKKEN_FILE))


def build(folder: Path) -> str | None:
    """Return the JSON text that `tiktoken.model` or `tekken.json` of a folder stands for, or None.

    Raises:
        ConfigError: when the file is damaged, or `tiktoken.model` is not one of Moonshot's.
        OSError: when a file cannot be read.
    """
    for name, convert in ((TIKTOKEN_FILE, _convert_tiktoken), (TEKKEN_FILE, _convert_tekken)):
        if (folder / name).is_file():
            try:
                return json.dumps(convert(folder), ensure_ascii=False)
            except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
                raise ConfigError(
                    f"{folder / name} is damaged ({type(error).__name__}: {error}): "
                    "download the model again."
                ) from None
    return None


def _convert_tiktoken(folder: Path) -> dict[str, Any]:
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") != _KIMI_CLASS:
        raise ConfigError(
            f"The tokenizer class {settings.get('tokenizer_class')} of {folder / TIKTOKEN_FILE} is "
            f"not supported, only {_KIMI_CLASS} of Moonshot's models is: use a conversion of the "
            f"model that has a {FILE}."
        )
    ranks: dict[bytes, int] = {}
    for line in (folder / TIKTOKEN_FILE).read_bytes().splitlines():
        if line.strip():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    named = {int(key): value for key, value in settings.get("added_tokens_decoder", {}).items()}
    added = []
    for number in range(len(ranks), len(ranks) + _KIMI_ADDED_TOKENS):
        known = named.get(number, {})
        content = known.get("content", f"<|reserved_token_{number}|>")
        added.append(_added_token(number, content, is_special=known.get("special", True)))
    return _byte_level_bpe(ranks, _KIMI_PATTERN, added)


def _convert_tekken(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / TEKKEN_FILE).read_text(encoding="utf-8"))
    settings = content["config"]
    listed = content.get("special_tokens")
    if listed is None:
        names = dict(enumerate(_OLD_TEKKEN_NAMES))
    else:
        names = {int(token["rank"]): str(token["token_str"]) for token in listed}
    special_count = settings.get("default_num_special_tokens", len(names))
    added = [
        _added_token(number, names.get(number, f"<SPECIAL_{number}>"), is_special=True)
        for number in range(special_count)
    ]
    entries = sorted(content["vocab"], key=lambda entry: int(entry["rank"]))
    if "default_vocab_size" in settings:
        # The file may have more tokens than the model.
        entries = entries[: settings["default_vocab_size"] - special_count]
    ranks = {
        base64.b64decode(entry["token_bytes"], validate=True): special_count + number
        for number, entry in enumerate(entries)
    }
    return _byte_level_bpe(ranks, settings["pattern"], added)


def _added_token(number: int, content: str, *, is_special: bool) -> dict[str, Any]:
    return {
        "id": number,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": is_special,
    }


def _byte_level_bpe(
    ranks: dict[bytes, int], pattern: str, added: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a tokenizer.json of the kind that GPT-2 introduced.

    Args:
        ranks: id of each token by its bytes; parts with a lower id are joined earlier.
        pattern: the regular expression that cuts a text before its bytes are joined.
        added: the added tokens.
    """
    first = min(ranks.values())
    names = {token["content"]: token["id"] for token in added}
    # The library takes the id of an added token from the vocabulary, or counts on from its end.
    ids_before = {name: number for name, number in names.items() if number < first}
    texts = {token: _text(token) for token in ranks}
    vocabulary = {texts[token]: number for token, number in ranks.items()}
    merges = [
        [texts[left], texts[right]]
        for token in sorted(ranks, key=ranks.__getitem__)
        if texts[token] not in names
        for left, right in _splits(token, ranks)
        if texts[left] not in names and texts[right] not in names
    ]
    for name in names:
        # An ordinary token of the same text could forge the added one.
        vocabulary.pop(name, None)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [cut, {**byte_level, "use_regex": False}],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": ids_before | vocabulary,
            "merges": merges,
        },
    }


def _splits(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return all pairs of tokens whose joined bytes are this token, lowest ids first."""
    found = [
        (token[:size], token[size:])
        for size in range(1, len(token))
        if token[:size] in ranks and token[size:] in ranks
    ]
    return sorted(found, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _byte_characters() -> dict[int, str]:
    """Return GPT-2's character for each byte: itself if printable, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }


_CHARACTER_OF_BYTE = _byte_characters()


def _text(token: bytes) -> str:
    return "".join([_CHARACTER_OF_BYTE[byte] for byte in token])
