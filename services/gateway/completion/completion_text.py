"""Text of one completion: detokenizing, stop strings and log probabilities of its tokens."""

import dataclasses
from collections import deque
from collections.abc import Callable

from services.gateway.tokenizing.detokenizer import Detokenizer
from services.gateway.tokenizing.stop_strings import StopStrings
from shared.messages import TokenLogprobs

LogprobsJson = Callable[[int, int, TokenLogprobs], tuple[bytes, ...]]
"""Serializer of a token's log probabilities, given its id and the position of its text."""


@dataclasses.dataclass(slots=True)
class LogprobEntry:
    """One generated token, the position of its text, and its log probabilities as JSON.

    They are serialized when the token arrives: those of a whole answer may take seconds.
    """

    token: int
    start_chars: int
    """Characters of the completion before this token's text."""
    end_chars: int
    """Characters up to its end. A token with a part of a character may have no text."""
    json: tuple[bytes, ...]
    """One element of each list in the answer's field `logprobs`."""


def _no_json(_token: int, _start_chars: int, _logprobs: TokenLogprobs) -> tuple[bytes, ...]:
    return ()


class CompletionText:
    """Text of one completion: decodes its tokens and cuts the text before the first stop string."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_ids: frozenset[int],
        stops: list[str],
        logprobs_json: LogprobsJson = _no_json,
    ) -> None:
        """Begin an empty text.

        Args:
            detokenizer: a new decoder, used for this completion only.
            stop_ids: token ids that end the completion and become no text.
            stops: stop strings; [] for none.
            logprobs_json: serializes the log probabilities of a token.
        """
        self._logprobs_json = logprobs_json
        self._detokenizer = detokenizer
        self._stop_ids = stop_ids
        self._stops = StopStrings(stops)
        self._has_stops = bool(stops)
        self._decoded_chars = self._sent_chars = 0
        """Characters so far; not counted where no log probabilities were requested."""
        self._entries: deque[LogprobEntry] = deque()
        self.tokens_after_stop = 0
        """Tokens of the last `add` that came after the stop string."""

    @property
    def found_stop(self) -> str:
        """The stop string that ended the text; "": none did."""
        return self._stops.found

    @property
    def has_logprobs(self) -> bool:
        """Whether there are entries that were neither taken nor dropped."""
        return bool(self._entries)

    def add(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> tuple[str, bool]:
        """Decode the next tokens, up to a stop id or a stop string.

        Args:
            tokens: token ids in order.
            logprobs: one entry per token; [] if none were requested.

        Returns:
            The text that can be sent now, and whether a stop string ended the completion. Text that
            may be the beginning of a stop string or ends inside a character is held back.
        """
        if len(tokens) == 1 and not logprobs and not self._has_stops:
            # The usual case. Only log probabilities need the positions of the text.
            return "" if tokens[0] in self._stop_ids else self._detokenizer.add(tokens[0]), False
        text = ""
        is_stopped = False
        for position, token in enumerate(tokens):
            if token in self._stop_ids:
                break
            piece = self._detokenizer.add(token)
            start_chars = self._decoded_chars
            self._decoded_chars += len(piece)
            if position < len(logprobs):
                json = self._logprobs_json(token, start_chars, logprobs[position])
                self._entries.append(LogprobEntry(token, start_chars, self._decoded_chars, json))
            if self._has_stops:
                piece, is_stopped = self._stops.push(piece)
            text += piece
            if is_stopped:
                self.tokens_after_stop = len(tokens) - position - 1
                break
        self._sent_chars += len(text)
        return text, is_stopped

    def finish(self) -> tuple[str, bool]:
        """Decode the end of the completion, when no more tokens follow.

        Returns:
            The text that was held back, and whether it contained a stop string; the text then ends
            before that string.
        """
        rest = self._detokenizer.finish()
        self._decoded_chars += len(rest)
        rest, is_stopped = self._stops.push(rest)
        if not is_stopped:
            rest += self._stops.finish()
        self._sent_chars += len(rest)
        return rest, is_stopped

    def take_logprobs(self, *, is_final: bool = False) -> list[LogprobEntry]:
        """Remove and return the entries of tokens whose text has been returned, in token order.

        Args:
            is_final: take the remaining entries too; set at the end if no stop string ended the
                text.
        """
        sent: list[LogprobEntry] = []
        while self._entries and (is_final or self._entries[0].start_chars < self._sent_chars):
            sent.append(self._entries.popleft())
        return sent

    def take_logprobs_of(self, places: list[range]) -> list[LogprobEntry]:
        """Remove and return the entries of tokens with text in some places, in token order.

        Entries of earlier tokens are removed too. A token without text counts as the next one.

        Args:
            places: positions of characters in the completion, after those of all calls before.
        """
        found: list[LogprobEntry] = []
        for place in places:
            self.drop_logprobs(place.start)
            while self._entries and self._entries[0].start_chars < place.stop:
                found.append(self._entries.popleft())
        return found

    def drop_logprobs(self, final_chars: int) -> None:
        """Remove the entries of tokens whose text ends within the first characters.

        Args:
            final_chars: number of these characters.
        """
        entries = self._entries
        while entries and max(entries[0].end_chars, entries[0].start_chars + 1) <= final_chars:
            entries.popleft()
