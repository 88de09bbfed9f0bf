"""Memory of the turns that the model wrote. Owns its limits; knows no template and no tokenizer."""

import array
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping

from services.gateway.conversation.conversation import Call, ConversationMessage
from services.gateway.tokenizing.replay.meaning import (
    written_calls,
)

TURN_TOKENS_MAX = 65_536
"""Longest turn that is remembered; each later request of its conversation decodes it."""
ABSENT_TURNS_MAX = 65_536
"""Most turns that are known to be stored nowhere, such as those of another server."""
_FIXED_BYTES = 1_024
"""Memory of a turn besides its texts and ids."""


DecodeTokens = Callable[[list[int]], str]
"""Returns the text of token ids with special tokens written out."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptPlace:
    """A place in the text of a rendered conversation: where a prompt ends and a turn begins."""

    chars: int
    """Length of the prompt's text."""
    digest: bytes
    """Digest of the prompt's text."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """What the model wrote in answer to one prompt."""

    place: PromptPlace
    ids: "array.array[int]"
    """The token ids, with the one that ended the turn, if one did."""
    stop: str
    """Text of the special token that ended the turn; "" if none did."""
    text: str
    """The answer, without reasoning and calls."""
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]
    """Id, name and arguments as text of each tool call."""

    @property
    def size_bytes(self) -> int:
        """Memory that the turn takes, about."""
        arguments = sum(len(text) for _, _, text in self.calls)
        chars = len(self.text) + len(self.reasoning) + arguments
        return _FIXED_BYTES + chars + self.ids.itemsize * len(self.ids)

    def written(self, decode: DecodeTokens) -> str:
        """Return the text of `ids` with special tokens, without the one that ended the turn.

        Args:
            decode: decodes token ids.
        """
        return decode(self.ids[:-1].tolist() if self.stop else self.ids.tolist())

    def restore(self, message: ConversationMessage) -> ConversationMessage | None:
        """Return a client's message of this turn as the model wrote it, None if it differs.

        Ids of calls stay the client's, because its results refer to them.

        Args:
            message: the client's message, whose text and calls mean the same as the turn's.
        """
        given = (message.reasoning or "").strip()
        if given and given != self.reasoning.strip():
            return None
        calls = [
            Call(replayed.call_id, written.name, written.arguments)
            for replayed, written in zip(
                message.calls, written_calls(list(self.calls)), strict=True
            )
        ]
        reasoning = self.reasoning or message.reasoning
        return dataclasses.replace(message, text=self.text, reasoning=reasoning, calls=calls)


KeepTurn = Callable[[str, bytes, Turn], None]
"""Stores a turn of a tenant under a key."""


class TurnMemory:
    """The latest turns of each tenant, by the conversation up to and with the turn. Thread-safe.

    When all turns take more than `bytes_max`, the tenant with the most bytes loses its oldest turn.
    """

    def __init__(self, bytes_max: int, keep: KeepTurn | None = None) -> None:
        """Begin without turns.

        Args:
            bytes_max: memory of all turns; 0: no turn is kept.
            keep: stores each new turn elsewhere too; None: turns are only in memory.
        """
        self._bytes_max = bytes_max
        self._keep = keep
        self._turns: dict[str, OrderedDict[bytes, Turn]] = {}
        self._bytes: dict[str, int] = {}
        self._total_bytes = 0
        self._absent: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """Memory of all turns."""
        return self._total_bytes

    def remember(self, tenant: str, key: bytes, turn: Turn) -> None:
        """Keep a turn that the model has just written; a turn with the same key is replaced.

        Args:
            tenant: whose turn it is; no other tenant gets it.
            key: digest of the conversation up to and with the turn (`digest_messages`).
            turn: the turn.
        """
        if self._add(tenant, key, turn) and self._keep is not None:
            self._keep(tenant, key, turn)

    def add_stored(self, tenant: str, turns: Mapping[bytes, Turn | None]) -> None:
        """Add turns that were kept elsewhere; those that are not there are not asked for again.

        Args:
            tenant: whose turns they are.
            turns: the turns by key; None: no such turn is there.
        """
        for key, turn in turns.items():
            if turn is None:
                self._mark_absent(tenant, key)
            else:
                self._add(tenant, key, turn)

    def _add(self, tenant: str, key: bytes, turn: Turn) -> bool:
        """Add a turn to the memory; return whether it is not too large."""
        if turn.size_bytes > self._bytes_max or len(turn.ids) > TURN_TOKENS_MAX:
            return False
        with self._lock:
            turns = self._turns.setdefault(tenant, OrderedDict())
            known = turns.pop(key, None)
            turns[key] = turn
            self._count(tenant, turn.size_bytes - (known.size_bytes if known else 0))
            while self._total_bytes > self._bytes_max:
                self._forget_one(max(self._bytes, key=self._bytes.__getitem__))
        return True

    def _mark_absent(self, tenant: str, key: bytes) -> None:
        with self._lock:
            self._absent[tenant, key] = None
            if len(self._absent) > ABSENT_TURNS_MAX:
                self._absent.popitem(last=False)

    def find_missing(
        self, tenant: str, messages: list[ConversationMessage], digests: list[bytes]
    ) -> list[bytes]:
        """Return the keys of a conversation's turns that are not in memory but may be stored.

        Args:
            tenant: who sends the conversation.
            messages: the conversation as the client sends it.
            digests: those of its messages (`digest_messages`).
        """
        keys = [
            key
            for key, message in zip(digests, messages, strict=True)
            if message.role == "assistant"
        ]
        with self._lock:
            known: Mapping[bytes, Turn] = self._turns.get(tenant, {})
            return [key for key in keys if key not in known and (tenant, key) not in self._absent]

    def recall(
        self, tenant: str, messages: list[ConversationMessage], digests: list[bytes]
    ) -> "Replay":
        """Find the turns of a conversation that the model wrote.

        Args:
            tenant: who sends the conversation.
            messages: the conversation as the client sends it.
            digests: those of its messages (`digest_messages`).
        """
        found: list[Turn] = []
        restored = list(messages)
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            turn = self._find(tenant, digests[index])
            own = None if turn is None else turn.restore(message)
            if turn is not None and own is not None:
                found.append(turn)
                restored[index] = own
        return Replay(restored, found)

    def _find(self, tenant: str, key: bytes) -> Turn | None:
        with self._lock:
            turns = self._turns.get(tenant)
            if turns is None or key not in turns:
                return None
            turns.move_to_end(key)
            return turns[key]

    def _forget_one(self, tenant: str) -> None:
        _, turn = self._turns[tenant].popitem(last=False)
        self._count(tenant, -turn.size_bytes)
        if not self._turns[tenant]:
            del self._turns[tenant], self._bytes[tenant]

    def _count(self, tenant: str, size_bytes: int) -> None:
        self._bytes[tenant] = self._bytes.get(tenant, 0) + size_bytes
        self._total_bytes += size_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """A conversation in which the model's own turns have their original form."""

    messages: list[ConversationMessage]
    """Its messages; the model's own as it wrote them, the others as the client sent them."""
    turns: list[Turn]
    """The model's own turns, in order."""
