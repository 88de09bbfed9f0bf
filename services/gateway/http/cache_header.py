"""Prefix cache facts in responses: the header `X-Lockstep-Cache` and the same facts in bodies.

The header's value is `pending`, or fields that are separated by `; `:

    memory=512; ssd=256; computed=33; diverged-at=801; miss=diverged; before="is the"; after="9"

`memory`, `ssd` and `computed` are always present and add up to the prompt's tokens. `diverged-at`
is the first position at which the prompt differs from the known sequence with the longest common
prefix. `miss` is the reason why the rest was computed (CachedPrefix.miss). `before` and `after` are
the prompt's own text around `diverged-at`, as JSON strings in ASCII without semicolons. Fields may
be added later. `pending` means that the stream began before the scheduler admitted the request.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from shared.messages import CachedPrefix

HEADER = "X-Lockstep-Cache"
PENDING = "pending"
TEXT_TOKENS = 16
"""Tokens before and after the divergence whose text is reported."""
TEXT_CHARS_MAX = 48
"""Longest text on each side of the divergence."""


def ids_at_divergence(
    ids: Sequence[int], cached: CachedPrefix
) -> tuple[list[int], list[int]] | None:
    """Return the token ids just before and just after the place where a prompt diverged.

    Args:
        ids: the prompt.
        cached: the scheduler's report on it.

    Returns:
        At most `TEXT_TOKENS` ids on each side; None without such a place.
    """
    if cached.diverged_at is None:
        return None
    place = cached.diverged_at
    return list(ids[max(0, place - TEXT_TOKENS) : place]), list(ids[place : place + TEXT_TOKENS])


def texts_at_divergence(
    ids: tuple[list[int], list[int]] | None, decode: Callable[[list[int]], str] | None
) -> tuple[str, str] | None:
    """Return the texts of what `ids_at_divergence` has returned, at most `TEXT_CHARS_MAX` each.

    Args:
        ids: the ids before and after; None: there is no such place.
        decode: makes text of token ids; None: no text is reported.
    """
    if ids is None or decode is None:
        return None
    before, after = ids
    return decode(before)[-TEXT_CHARS_MAX:], decode(after)[:TEXT_CHARS_MAX]


def header_value(
    cached: CachedPrefix | None, prompt_tokens: int, texts: tuple[str, str] | None = None
) -> str:
    """Return the value of `X-Lockstep-Cache` for a prompt, in the format that the module defines.

    Args:
        cached: the scheduler's report on the prompt; None before it admitted the request, for which
            the value is `pending`.
        prompt_tokens: length of the prompt in tokens.
        texts: the prompt's text before and after the divergence; None without one.
    """
    if cached is None:
        return PENDING
    fields: dict[str, Any] = {
        "memory": cached.memory_tokens,
        "ssd": cached.stored_tokens,
        "computed": _computed(cached, prompt_tokens),
        "diverged-at": cached.diverged_at,
        "miss": cached.miss or None,
    }
    if texts is not None:
        fields |= {"before": _quoted(texts[0]), "after": _quoted(texts[1])}
    return "; ".join(f"{name}={value}" for name, value in fields.items() if value is not None)


def body_fields(
    cached: CachedPrefix | None, prompt_tokens: int, texts: tuple[str, str] | None = None
) -> dict[str, Any] | None:
    """Return the facts of `X-Lockstep-Cache` as fields of a JSON body, None without `cached`.

    The fields are `memory_tokens`, `ssd_tokens`, `computed_tokens`, `diverged_at` (a position or
    None), `miss` (a cause or None), `text_before` and `text_after` (text or None).

    Args:
        cached: the scheduler's report on the prompt; None before it admitted the request.
        prompt_tokens: length of the prompt in tokens.
        texts: the prompt's text before and after the divergence; None without one.
    """
    if cached is None:
        return None
    before, after = texts or (None, None)
    return {
        "memory_tokens": cached.memory_tokens,
        "ssd_tokens": cached.stored_tokens,
        "computed_tokens": _computed(cached, prompt_tokens),
        "diverged_at": cached.diverged_at,
        "miss": cached.miss or None,
        "text_before": before,
        "text_after": after,
    }


def _quoted(text: str) -> str:
    """Return a text as a JSON string that is valid in a header and has no separator of fields."""
    return json.dumps(text).replace(";", "\\u003b").replace("\x7f", "\\u007f")


def _computed(cached: CachedPrefix, prompt_tokens: int) -> int:
    return max(0, prompt_tokens - cached.memory_tokens - cached.stored_tokens)
