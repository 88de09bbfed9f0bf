"""What clients are told of the prefix cache: a response header, and the same facts in bodies.

The header's value is `pending`, or fields that are separated by `; `:

    memory=512; ssd=256; computed=33; diverged-at=801; miss=diverged

`memory`, `ssd` and `computed` are always there and add up to the prompt's tokens. `diverged-at` is
the first position at which the prompt differs from the known sequence that it shares most with.
`miss` says why the rest was computed, in a word of the protocol (CachedPrefix.miss). Fields may be
added. `pending`: the stream began before the request was admitted.
"""

from typing import Any

from shared.messages import CachedPrefix

HEADER = "X-Lockstep-Cache"
PENDING = "pending"


def line(cached: CachedPrefix | None, prompt_tokens: int) -> str:
    """Return the header's value; None: nothing is known yet."""
    if cached is None:
        return PENDING
    fields = [
        f"memory={cached.memory_tokens}",
        f"ssd={cached.stored_tokens}",
        f"computed={_computed(cached, prompt_tokens)}",
    ]
    if cached.diverged_at is not None:
        fields.append(f"diverged-at={cached.diverged_at}")
    if cached.miss:
        fields.append(f"miss={cached.miss}")
    return "; ".join(fields)


def shape(cached: CachedPrefix | None, prompt_tokens: int) -> dict[str, Any] | None:
    """Return the same facts for a body; None: nothing is known."""
    if cached is None:
        return None
    return {
        "memory_tokens": cached.memory_tokens,
        "ssd_tokens": cached.stored_tokens,
        "computed_tokens": _computed(cached, prompt_tokens),
        "diverged_at": cached.diverged_at,
        "miss": cached.miss or None,
    }


def _computed(cached: CachedPrefix, prompt_tokens: int) -> int:
    return max(0, prompt_tokens - cached.memory_tokens - cached.stored_tokens)
