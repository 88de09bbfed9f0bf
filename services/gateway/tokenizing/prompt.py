"""A prompt's token ids, and how far other prompts will be like it: what caches are kept for.

Nothing here needs to be exact for an answer to be right. A place that is told too early or not at
all costs some prefill later on.
"""

import array
import dataclasses
import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from services.gateway.http.errors import ApiError
from services.gateway.tokenizing.encoder import Conversation

INSTRUCTIONS_MAX = 32
"""Different instructions remembered. 20,000 tokens of them take 80 KB."""

_USER = {"role": "user", "content": "\u2042"}
"""A message that no client's message begins like."""
_ASSISTANT = {"role": "assistant", "content": "\u2042"}

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class Render(Protocol):
    """Makes the text of messages and tools."""

    def __call__(self, fields: Any, *, opens_answer: bool = True) -> str:
        """Return the text; `opens_answer`: up to where the assistant's answer begins."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue."""

    ids: list[int]
    system_tokens: int = 0
    """So many first ones are instructions and tools, which other conversations begin with too."""
    cache_boundaries: list[int] = dataclasses.field(default_factory=list)
    """Lengths, rising, at which a later prompt may part from this one."""


class Instructions:
    """How many first tokens conversations with the same system prompt and tools have in common.

    Remembered for those seen lately. May be used by several threads at once.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, array.array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def count(
        self,
        conversation: Conversation,
        messages: Messages,
        tools: Tools,
        arguments: dict[str, Any],
        render: Render,
    ) -> int:
        """Return the count for a conversation; 0 without instructions."""
        system = list(itertools.takewhile(lambda one: one["role"] == "system", messages))
        if not system and not tools:
            return 0
        identity = msgspec.json.encode([system, tools, arguments])
        key = hashlib.blake2b(identity, digest_size=32).digest()
        known = self._recall(key)
        if known is not None and array.array("i", conversation.ids[: len(known)]) == known:
            return len(known)
        count = _shared(conversation, [*system, _USER], tools, render)
        self._remember(key, array.array("i", conversation.ids[:count]))
        return count

    def _recall(self, key: bytes) -> "array.array[int] | None":
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def _remember(self, key: bytes, ids: "array.array[int]") -> None:
        with self._lock:
            self._known[key] = ids
            self._known.move_to_end(key)
            if len(self._known) > INSTRUCTIONS_MAX:
                self._known.popitem(last=False)


def find_cache_boundaries(
    conversation: Conversation, messages: Messages, tools: Tools, render: Render
) -> list[int]:
    """Return at which lengths, rising, the prompts that may come next part from this one.

    Three may come: this one goes on (a tool was called); the user answers, for which some templates
    rewrite what came before (thinking is stripped, tools move); the last message is tried again.
    """

    def closed(fields: Any) -> str:
        return render(fields, opens_answer=False)

    goes_on = _shared(conversation, messages, tools, closed)
    answered = _shared(conversation, [*messages, _ASSISTANT, _USER], tools, render)
    cache_boundaries = {goes_on, min(goes_on, answered)}
    places = [place for place, one in enumerate(messages) if one["role"] == "user"]
    if places:
        cache_boundaries.add(_shared(conversation, [*messages[: places[-1]], _USER], tools, render))
    return sorted(cache_boundaries - {0})


def _shared(
    conversation: Conversation, messages: Messages, tools: Tools, render: Callable[[Any], str]
) -> int:
    try:
        return conversation.shared_tokens([messages, tools], render)
    except ApiError:
        # The template refuses a conversation that its client has not had.
        return 0
