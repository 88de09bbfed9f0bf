"""Small files in the formats of Kimi's tiktoken.model and Mistral's tekken.json."""

import base64
import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

_TEXT = [
    "The scheduler decides, every rank obeys. It's fine, isn't it? WE'LL SEE; they've gone.",
    "Grüße aus Köln! 漢字と日本語 是中文字符, 你好世界 你好. Привет мир, Ελληνικά, हिन्दी, 🎉🦊",
    "def main(values: list[int]) -> int:\r\n\treturn sum(values[:10]) == 12345678  # comment\n\n\n",
    "hahahahaha abababab aaaaaaaaaaaaa ---------- ======== 0000 1,000,000.00      x",
] * 20
KIMI_ADDED = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    7: ("<|im_system|>", True),
    8: ("<|im_middle|>", True),
    10: ("<|tool_calls_section_begin|>", False),
    11: ("<|tool_call_begin|>", False),
    12: ("<think>", False),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}
"""Names of some tokens after the ranks, by their number, and whether they are special."""
KIMI_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}"
    "{{- message.content + '<|im_end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"
)


@functools.cache
def ranks(pattern: str, size: int = 700) -> list[bytes]:
    """Return the bytes of the tokens of a BPE vocabulary, in the order in which they were found.

    Args:
        pattern: the regular expression that cuts a text.
        size: number of tokens.
    """
    backend = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    backend.train_from_iterator(_TEXT, trainer)
    bytes_of = {char: byte for byte, char in bytes_to_unicode().items()}
    pieces = sorted(backend.get_vocab().items(), key=lambda entry: entry[1])
    return [bytes(bytes_of[char] for char in piece) for piece, _ in pieces]


def write_kimi(folder: Path, pattern: str, **settings: Any) -> Path:
    """Write a model folder with a tiktoken.model as Kimi has it, and return it."""
    tokens = ranks(pattern)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        str(len(tokens) + number): {"content": content, "special": special}
        for number, (content, special) in KIMI_ADDED.items()
    }
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(KIMI_TEMPLATE)
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('model code was run')")
    stop = len(tokens) + 2
    size = {"vocab_size": len(tokens) + 256, "eos_token_id": stop}
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", **size}))
    return folder


def write_tekken(folder: Path, pattern: str, *, lists_special: bool = True) -> Path:
    """Write a model folder with a tekken.json as Mistral has it, and return it."""
    tokens = ranks(pattern)
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
    content: dict[str, Any] = {
        "config": {
            "pattern": pattern,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": 40 + len(tokens) - 10,
            "default_num_special_tokens": 40,
            "version": "v11",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
    }
    if lists_special:
        content["special_tokens"] = [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
        ]
    (folder / "tekken.json").write_text(json.dumps(content))
    template = (
        "{{- '<s>' }}{%- for message in messages %}"
        "{{- '[INST]' + message.content + '[/INST]' if message.role == 'user'"
        " else message.content + '</s>' }}"
        "{%- endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text('{"model_type": "mistral3", "eos_token_id": 2}')
    return folder
