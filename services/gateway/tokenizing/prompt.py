"""Prompts as token ids, with the lengths at which later prompts are expected to diverge.

The cache keeps state at these lengths. A wrong length costs some prefill later, never a wrong
completion.
"""

import array
import dataclasses
import functools
import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from services.gateway.http.errors import ApiError
from services.gateway.tokenizing.encoder import EncodedConversation
from services.gateway.tokenizing.replay.turns import PromptPlace

PREFIXES_MAX = 32
"""Different system prompts remembered. One of 20,000 tokens takes 80 KB."""

_USER = {"role": "user", "content": "\u2042"}
"""A placeholder whose text differs from the first character of any real message."""
_ASSISTANT = {"role": "assistant", "content": "\u2042"}

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class Render(Protocol):
    """Renderer of messages and tools to text with a chat template."""

    def __call__(self, fields: Any, *, opens_answer: bool = True) -> str:
        """Return the text of a conversation.

        Args:
            fields: [messages, tools] as chat templates expect them; tools may be None.
            opens_answer: add the start of the assistant's next message.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, with the prefix lengths at which later prompts may diverge."""

    ids: Sequence[int]
    """Its token ids; kept as long as the request, so as an array instead of a list."""
    system_tokens: int = 0
    """Number of first tokens that are instructions and tools, shared with other conversations."""
    cache_boundaries: list[int] = dataclasses.field(default_factory=list)
    """Ascending lengths at which a later prompt may diverge from this one."""
    place: PromptPlace | None = None
    """End of the text of a conversation; None for raw prompts."""
    conversation_key: bytes = b""
    """Digest of the meaning of the conversation (`digest_messages`)."""
    tail: str = ""
    """Last characters of a conversation's text, in which its answer may have begun."""


class InstructionPrefixes:
    """Cache of instruction prefixes: the first tokens that hold system prompt and tools.

    Conversations with equal instructions share this prefix, so its length is computed once. Keeps
    the `PREFIXES_MAX` most recently used prefixes. Thread-safe.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, array.array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def count_tokens(
        self,
        conversation: EncodedConversation,
        messages: Messages,
        tools: Tools,
        arguments: dict[str, Any],
        render: Render,
    ) -> int:
        """Return how many first tokens of a conversation are system prompt and tools, 0 if none.

        Args:
            conversation: the encoded conversation.
            messages: its messages; the system messages at the start are the system prompt.
            tools: its tools.
            arguments: further arguments of the chat template.
            render: renders messages and tools.
        """
        system = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
        if not system and not tools:
            return 0
        identity = msgspec.json.encode([system, tools, arguments])
        key = hashlib.blake2b(identity, digest_size=32).digest()
        known = self._recall(key)
        if known is not None and array.array("i", conversation.ids[: len(known)]) == known:
            return len(known)
        count = _shared_tokens(conversation, [*system, _USER], tools, render)
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
            if len(self._known) > PREFIXES_MAX:
                self._known.popitem(last=False)


def find_cache_boundaries(
    conversation: EncodedConversation, messages: Messages, tools: Tools, render: Render
) -> list[int]:
    """Return the ascending prefix lengths in tokens at which later prompts may diverge.

    Three kinds of prompts may follow: the same messages and more after a tool call; an answer of
    the user, before which some templates rewrite earlier text (they strip thinking or move tools);
    the same conversation with another last message.

    Args:
        conversation: the encoded conversation.
        messages: its messages.
        tools: its tools.
        render: renders messages and tools.
    """
    closed = functools.partial(render, opens_answer=False)
    continued = _shared_tokens(conversation, messages, tools, closed)
    answered = _shared_tokens(conversation, [*messages, _ASSISTANT, _USER], tools, render)
    cache_boundaries = {continued, min(continued, answered)}
    turns = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if turns:
        cache_boundaries.add(
            _shared_tokens(conversation, [*messages[: turns[-1]], _USER], tools, render)
        )
    return sorted(cache_boundaries - {0})


def _shared_tokens(
    conversation: EncodedConversation,
    messages: Messages,
    tools: Tools,
    render: Callable[[Any], str],
) -> int:
    try:
        return conversation.count_shared_tokens([messages, tools], render)
    except ApiError:
        # The template refuses this hypothetical conversation.
        return 0
