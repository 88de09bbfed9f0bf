"""Recorder of one completion of a conversation, which makes a turn of it at its end."""

import array

from services.gateway.conversation.conversation import ConversationMessage
from services.gateway.http.errors import ApiError
from services.gateway.output.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    OutputEvent,
    Reasoning,
    Text,
)
from services.gateway.tokenizing.replay.meaning import (
    Defaults,
    digest_message,
    written_calls,
)
from services.gateway.tokenizing.replay.turns import (
    TURN_TOKENS_MAX,
    DecodeTokens,
    PromptPlace,
    Turn,
    TurnMemory,
)


class TurnRecorder:
    """Collects the events of one completion and remembers the turn when it ends."""

    def __init__(
        self,
        memory: TurnMemory,
        tenant: str,
        key: bytes,
        place: PromptPlace,
        decode: DecodeTokens,
        stop_ids: frozenset[int],
        defaults: Defaults,
    ) -> None:
        """Begin an empty turn.

        Args:
            memory: keeps the turn at its end.
            tenant: whose turn it is.
            key: digest of the conversation that it answers.
            place: where its prompt's text ends.
            decode: decodes the token that ended the turn.
            stop_ids: token ids that end a turn.
            defaults: those of the tools that it may call; clients add them to calls.
        """
        self._memory = memory
        self._tenant = tenant
        self._key = key
        self._place = place
        self._decode = decode
        self._stop_ids = stop_ids
        self._defaults = defaults
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []

    def add(self, event: OutputEvent) -> None:
        """Add the next event of the completion."""
        match event:
            case Text():
                self._texts.append(event.text)
            case Reasoning():
                self._reasoning.append(event.text)
            case CallBegun():
                self._calls.append((event.call_id, event.name, []))
            case CallArguments():
                self._calls[-1][2].append(event.text)
            case CallEnded():
                pass

    def finish(self, tokens: list[int]) -> None:
        """Remember the turn. Its text is decoded when it comes back, in a thread, and not here.

        Args:
            tokens: all token ids of the completion.
        """
        if not tokens or len(tokens) > TURN_TOKENS_MAX:
            return
        is_stopped = tokens[-1] in self._stop_ids
        calls = [(call_id, name, "".join(pieces)) for call_id, name, pieces in self._calls]
        turn = Turn(
            place=self._place,
            ids=array.array("i", tokens),
            stop=self._decode(tokens[-1:]) if is_stopped else "",
            text="".join(self._texts),
            reasoning="".join(self._reasoning),
            calls=tuple(calls),
        )
        try:
            message = ConversationMessage("assistant", turn.text, calls=written_calls(calls))
        except ApiError:
            # Arguments that a client may not send back.
            return
        key = digest_message(self._key, message, {}, self._defaults)
        self._memory.remember(self._tenant, key, turn)
