"""A tokenizer with as many ids as the tiny models, and grammars for it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.rank_worker.sampling.grammar.compiler import GrammarCompiler
from shared.messages import Grammar
from tests.mlx.models import VOCAB

END = 210
"""Ends completions; its text is that of no other token."""
MARK = 209
"""Where grammars begin that have a mark."""

_PIECES = ["12", "345", "00", "abc", "de", '":', '",', '{"', "true", "false", "null", "  "]


def token_texts() -> list[str]:
    """Return the text of each token: printable ASCII, some longer pieces, then unused ones."""
    texts = [chr(code) for code in range(33, 127)] + _PIECES
    texts += [f"<unused {number}>" for number in range(VOCAB - len(texts))]
    texts[MARK], texts[END] = "<mark>", "<end>"
    return texts


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json to a folder and return the folder."""
    texts = token_texts()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = [n for n, text in enumerate(texts) if text.startswith("<") and len(text) > 1]
    level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": n, "content": texts[n], "special": True, **flags} for n in special],
        "pre_tokenizer": {"type": "ByteLevel", **level},
        "decoder": {"type": "ByteLevel", **level},
        "model": {
            "type": "BPE",
            # A space is written as this letter in byte-level vocabularies.
            "vocab": {text.replace(" ", "\u0120"): n for n, text in enumerate(texts)},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def make_compiler(folder: Path) -> GrammarCompiler:
    """Return a compiler for the tiny tokenizer, which is written to `folder`."""
    return GrammarCompiler(write_tokenizer(folder))


def text_of(tokens: list[int]) -> str:
    """Return the text of tokens, without the end."""
    texts = token_texts()
    return "".join(texts[token] for token in tokens if token != END)


def regex(
    pattern: str, *, begin_ids: Sequence[int] = (), barred_ids: Sequence[int] = ()
) -> Grammar:
    """Return the grammar of a regular expression."""
    return Grammar(
        text=f"start: /{pattern}/",
        end_ids=[END],
        begin_ids=list(begin_ids),
        barred_ids=list(barred_ids),
    )


def json_schema(schema: Mapping[str, object]) -> Grammar:
    """Return the grammar of a JSON schema, without white space."""
    exact = {**schema, "x-guidance": {"whitespace_flexible": False}}
    return Grammar(text=json.dumps({"grammars": [{"json_schema": exact}]}), end_ids=[END])
