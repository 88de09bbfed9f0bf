"""Tokenizer: a byte-level BPE of 2,048 tokens, trained on generated text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model.conversations import skill_copy, words
from tools.demo_model.conversations.chat import (
    CALL_END,
    CALL_START,
    CHAT_TEMPLATE,
    END_OF_TEXT,
    RESPONSE_END,
    RESPONSE_START,
    TURN_END,
    TURN_START,
    segments,
)
from tools.demo_model.conversations.facts import FACTS
from tools.demo_model.conversations.mixture import train_chat
from tools.demo_model.conversations.words import TextSource

VOCABULARY = 2048
CONTEXT_TOKENS = 8192
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MARKERS = (CALL_START, CALL_END, RESPONSE_START, RESPONSE_END)

# The split of the Qwen tokenizers: every digit is a token of its own.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _corpus(chats: int) -> Iterator[str]:
    """Yield text to learn merges from: mostly words, so that random strings take no merges."""
    source = TextSource("tokenizer")
    split = re.compile("|".join(map(re.escape, SPECIAL_TOKENS + MARKERS)))
    for _ in range(6):
        for fact in FACTS:
            yield " ".join((fact.answer, *fact.trained))
        for pool in (words.NOUNS, words.VERBS, words.ADJECTIVES, words.NAMES, words.CITIES):
            yield " " + " ".join(word for word in pool if not words.is_held_out(word))
    yield from skill_copy.PROMPTS
    for _ in range(chats):
        chat = train_chat(source, is_long=False)
        text = "".join(piece.text for piece in segments(chat))
        yield from split.split(text)  # a marker is a token of its own: no merges for its letters


def train_tokenizer(chats: int = 12_000) -> Tokenizer:
    """Train the byte-level BPE tokenizer on generated conversations.

    Special tokens are at the end of its vocabulary.

    Args:
        chats: number of conversations.

    Raises:
        ValueError: when the vocabulary has another size than VOCABULARY.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = list(SPECIAL_TOKENS) + list(MARKERS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(chats), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)
    special = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
    write_json(folder / "special_tokens_map.json", special)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
