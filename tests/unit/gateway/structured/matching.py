"""A byte for a token: which texts a grammar matches, and random texts that do."""

import random
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from services.gateway.structured.byte_tokenizer import ByteTokenizer
from services.gateway.structured.trials import Trials
from shared.messages import Grammar
from shared.model.grammars import compile_grammar

SPECIAL_TOKENS = {
    text: number
    for number, text in enumerate(
        [
            *("<|im_start|>", "<|im_end|>", "<|channel|>", "<|message|>", "<|constrain|>"),
            *("<|end|>", "<|start|>", "<|call|>", "<|return|>", "<|tool_calls_section_begin|>"),
            *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
            *("<|tool_call_argument_begin|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        ]
    )
}
END = SPECIAL_TOKENS["<|im_end|>"]
TRIALS = Trials()
"""Shared by all tests, because a process takes a moment to start."""

_BYTES = ByteTokenizer(list(SPECIAL_TOKENS.values()))
_TOKENIZER = LLTokenizer(TokenizerWrapper(_BYTES), slices=[])


def tokens_of(text: str) -> list[int]:
    """Return special tokens and bytes of a text."""
    tokens: list[int] = []
    while text:
        special = next((name for name in SPECIAL_TOKENS if text.startswith(name)), None)
        if special is not None:
            tokens.append(SPECIAL_TOKENS[special])
            text = text[len(special) :]
        else:
            tokens += _BYTES(text[0])
            text = text[1:]
    return tokens


def start(grammar: Grammar) -> LLMatcher:
    """Return a matcher at the start of a grammar."""
    matcher = compile_grammar(_TOKENIZER, grammar.text)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def matches(grammar: Grammar, text: str) -> bool:
    """Return whether a whole text matches a grammar."""
    matcher = start(grammar)
    return bool(matcher.consume_tokens(tokens_of(text))) and matcher.is_accepting()


def _text_of(token: int) -> bytes:
    name = next((text for text, number in SPECIAL_TOKENS.items() if number == token), None)
    return _BYTES.tokens[token] if name is None else name.encode()


def random_text(
    grammar: Grammar, seed: int, tokens_max: int = 4_000, likely: Sequence[str] = ()
) -> str:
    """Return a random text that matches, which ends where it may.

    Args:
        grammar: the grammar.
        seed: of the random numbers.
        tokens_max: most tokens of the text.
        likely: texts that are tried now and then, such as the ends of free texts.
    """
    chance = random.Random(seed)
    matcher = start(grammar)
    data = b""
    for _ in range(tokens_max):
        tried = tokens_of(chance.choice(likely)) if likely and chance.random() < 0.5 else []
        if tried and matcher.validate_tokens(tried) == len(tried):
            assert matcher.consume_tokens(tried)
            data += b"".join(_text_of(token) for token in tried)
            continue
        mask = matcher.compute_bitmask()
        allowed = [
            token for token in range(_BYTES.eos_token_id) if mask[token // 8] >> token % 8 & 1
        ]
        if matcher.is_accepting() and (not allowed or chance.random() < 0.3):
            return data.decode()
        token = chance.choice(allowed)
        data += _text_of(token)
        assert matcher.consume_token(token)
    raise AssertionError(f"no end within {tokens_max} tokens: {data[-200:]!r}")
