"""Log probabilities in OpenAI's two shapes."""

from typing import Any

from services.gateway.completion.completion_text import LogprobEntry
from services.gateway.tokenizing.tokenizer import Tokenizer


def chat_shape(tokenizer: Tokenizer, entries: list[LogprobEntry]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice or chunk."""
    return {"content": [_chat_entry(tokenizer, entry) for entry in entries], "refusal": None}


def completion_shape(
    tokenizer: Tokenizer, entries: list[LogprobEntry], offset_chars: int
) -> dict[str, Any]:
    """Return the `logprobs` object of a completion choice or chunk.

    Args:
        tokenizer: names the tokens.
        entries: the tokens.
        offset_chars: length of the echoed prompt, which stands before the completion's text.
    """
    top = [
        {
            _legacy_name(tokenizer, token): logprob
            for token, logprob in zip(
                entry.logprobs.top_ids, entry.logprobs.top_logprobs, strict=True
            )
        }
        for entry in entries
    ]
    return {
        "text_offset": [offset_chars + entry.start_chars for entry in entries],
        "token_logprobs": [entry.logprobs.logprob for entry in entries],
        "tokens": [_legacy_name(tokenizer, entry.token) for entry in entries],
        "top_logprobs": top if any(top) else None,
    }


def _chat_entry(tokenizer: Tokenizer, entry: LogprobEntry) -> dict[str, Any]:
    top = zip(entry.logprobs.top_ids, entry.logprobs.top_logprobs, strict=True)
    return {
        **_named(tokenizer, entry.token, entry.logprobs.logprob),
        "top_logprobs": [_named(tokenizer, token, logprob) for token, logprob in top],
    }


def _named(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _legacy_name(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text; parts of characters as OpenAI names them, so they stay distinct."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
