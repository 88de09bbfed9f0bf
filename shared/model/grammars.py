"""Set-up of llguidance that gateways and ranks share. Owns its limits; matches no token."""

import json
import re
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import llguidance
from llguidance import LLMatcher, LLTokenizer

from shared.errors import ConfigError, Refusal
from shared.model import tokenizer_json
from shared.model.grammar_depth import count_levels

LIBRARY_VERSION = llguidance.get_version()
"""Versions of llguidance and of its regular expressions; masks are equal only where these are."""

TEXT_END = "<|lockstep end of text|>"
"""The token that stands for the end of the text; no model has it."""

_TAG = re.compile(r"<[^<>]+>")

PARSER_ITEMS_MAX = 500
"""Items per position of llguidance's parser. With its own limit, 2,000, an ambiguous grammar of one
line took 2 s for one token, which all rows of the step would wait for; with this one 15 ms."""

LEVELS_MAX = 10_000
"""Most levels that the library may descend. A schema of 500 definitions that name each other has
about 3,000."""
_LEVELS_OF_ANY_THREAD = 200
"""Levels for which every thread's stack is large enough."""
_DEEP_STACK_BYTES = 256 * 1024 * 1024
"""Stack of a thread for deeper grammars. Measured: up to 12 KiB a level. Pages that
nothing touches take no memory."""
LEXER_STATES_MAX = 50_000
"""States of the automaton of a grammar's regular expressions, of which each sequence has its own.
A state takes 0.4 to 2 kB, those of a sequence at most 60 MB (measured): with the library's limit,
250,000, 32 sequences with one short regular expression could take all memory of a rank."""

_stack_size_lock = threading.Lock()


def is_special(text: str, *, is_flagged: bool) -> bool:
    """Return whether an added token is special in grammars: never a part of free text.

    Models write tags such as `<tool_call>` as one token, which few tokenizers flag as special.

    Args:
        text: the token's text.
        is_flagged: the tokenizer's file calls it special.
    """
    return is_flagged or _TAG.fullmatch(text) is not None


def special_name(token: int) -> str:
    """Return the name of a special token in the library; no text has it."""
    return f"<|lockstep token {token}|>"


def read_tokenizer(folder: Path) -> LLTokenizer:
    """Read a model's tokenizer for matchers. Takes seconds for a vocabulary of 150,000 tokens.

    The library holds Python's interpreter lock for that time. The tokenizer's `eos_token` is a
    token of its own that stands for the end of the text, after all tokens of the file: its bit in a
    mask says whether the grammar accepts. Models end their completions with other ids. Special
    tokens are known by their ids only; their text is cut into other tokens.

    Args:
        folder: the model's folder.

    Raises:
        Refusal: the folder has no tokenizer that the library can read.
    """
    try:
        text = tokenizer_json.read(folder)
    except (ConfigError, ValueError) as error:
        raise Refusal(f"Grammars cannot be matched with this model: {error}") from None
    if text is None:
        raise Refusal(
            f"Grammars cannot be matched with the model in {folder}: it has no "
            f"{tokenizer_json.FILE}."
        )
    try:
        description = json.loads(text)
        _rename_special_tokens(description)
        end = _own_size(description)
        description["added_tokens"] = [*(description.get("added_tokens") or []), _text_end(end)]
        return LLTokenizer(json.dumps(description), eos_token=end)
    except (ValueError, LookupError, TypeError) as error:
        raise Refusal(
            f"Grammars cannot be matched with the model in {folder}: llguidance cannot read "
            f"its {tokenizer_json.FILE} ({error})."
        ) from None


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Return a matcher at the start of a grammar; `get_error` of it says why it failed.

    Its work is bounded by counted steps, not by time, so all ranks fail alike. The library would
    end the process where a grammar needs more stack than there is.

    Args:
        tokenizer: the model's.
        text: the grammar, in llguidance's JSON or in Lark.

    Raises:
        Refusal: the parts of the grammar are nested too deeply, or the library fails in it; its
            text is a clause about the grammar.
    """
    levels = count_levels(text)
    if levels > LEVELS_MAX:
        raise Refusal(
            "its rules, groups or references name each other too deeply: they have more than "
            f"{LEVELS_MAX:,} levels"
        )
    if levels <= _LEVELS_OF_ANY_THREAD:
        return _compile(tokenizer, text)
    compiled: Future[LLMatcher] = Future()

    def work() -> None:
        try:
            compiled.set_result(_compile(tokenizer, text))
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            compiled.set_exception(error)

    with _stack_size_lock:
        usual_bytes = threading.stack_size(_DEEP_STACK_BYTES)
        try:
            threading.Thread(target=work, name="deep grammar", daemon=True).start()
        finally:
            threading.stack_size(usual_bytes)
    return compiled.result()


def _compile(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    limits = llguidance.LLParserLimits(
        max_items_in_row=PARSER_ITEMS_MAX, max_lexer_states=LEXER_STATES_MAX, verbose_errors=False
    )
    try:
        return LLMatcher(tokenizer, text, log_level=0, limits=limits)
    except BaseException as error:
        # A panic inside the library is no Exception.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise Refusal(f"the library fails in it ({type(error).__name__})") from error


def _rename_special_tokens(tokenizer: dict[str, Any]) -> None:
    """Give the special tokens of a tokenizer.json, which is changed, names that no text has.

    Where a grammar leaves no choice, the library takes the tokens of the text that follows. It
    would find special tokens by their names there, and then refuse them.
    """
    model = tokenizer["model"]
    names: dict[str, str] = {}
    for token in tokenizer.get("added_tokens") or []:
        if is_special(token["content"], is_flagged=token["special"]):
            names[token["content"]] = special_name(token["id"])
            token |= {"content": names[token["content"]], "special": True}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    # It only adds tokens around a text, by their names.
    tokenizer["post_processor"] = None


def _text_end(token: int) -> dict[str, Any]:
    """Return an added token for the end of the text, with this id."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token, "content": TEXT_END, "special": True, **flags}


def _own_size(tokenizer: dict[str, Any]) -> int:
    """Return the number of ids of a tokenizer.json, whose vocabulary is a map or a list."""
    vocabulary = tokenizer["model"]["vocab"]
    ids = vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    added = [one["id"] for one in tokenizer.get("added_tokens") or []]
    return 1 + max(int(one) for one in [*ids, *added])
