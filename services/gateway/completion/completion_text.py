"""Text of one completion: detokenizing, stop strings and log probabilities of its tokens."""

from collections import deque

from services.gateway.tokenizing.detokenizer import Detokenizer
from services.gateway.tokenizing.stop_strings import StopStrings
from shared.messages import TokenLogprobs


class LogprobEntry:
    """One generated token with its log probabilities and its position in the text."""

    __slots__ = ("logprobs", "start_chars", "token")

    def __init__(self, token: int, start_chars: int, logprobs: TokenLogprobs) -> None:
        self.token = token
        self.start_chars = start_chars
        self.logprobs = logprobs


class CompletionText:
    """The growing text of one completion."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_ids: frozenset[int],
        stops: list[str],
        *,
        has_logprobs: bool,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_ids = stop_ids
        self._stops = StopStrings(stops) if stops else None
        self._has_logprobs = has_logprobs
        self._decoded_chars = 0
        self._sent_chars = 0
        self._entries: deque[LogprobEntry] = deque()
        self.tokens_after_stop = 0
        """Tokens of the last `add` that came after the stop string."""

    def add(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> tuple[str, bool]:
        """Add new tokens. Stop ids become no text.

        Returns:
            The text that can be sent now, and whether a stop string ended the completion.
        """
        text = ""
        is_stopped = False
        for position, token in enumerate(tokens):
            if token in self._stop_ids:
                break
            if self._has_logprobs and position < len(logprobs):
                self._entries.append(LogprobEntry(token, self._decoded_chars, logprobs[position]))
            piece = self._detokenizer.add(token)
            self._decoded_chars += len(piece)
            if self._stops is not None and piece:
                piece, is_stopped = self._stops.push(piece)
            text += piece
            if is_stopped:
                self.tokens_after_stop = len(tokens) - position - 1
                break
        self._sent_chars += len(text)
        return text, is_stopped

    def finish(self) -> tuple[str, bool]:
        """Return the rest of the text, and whether it ends with a stop string."""
        rest = self._detokenizer.finish()
        self._decoded_chars += len(rest)
        is_stopped = False
        if self._stops is not None:
            rest, is_stopped = self._stops.push(rest)
            if not is_stopped:
                rest += self._stops.finish()
        self._sent_chars += len(rest)
        return rest, is_stopped

    def take_logprobs(self, *, is_final: bool = False) -> list[LogprobEntry]:
        """Return and remove the entries whose text was sent.

        Args:
            is_final: return entries without text too; set at an end without stop string.
        """
        sent: list[LogprobEntry] = []
        while self._entries and (is_final or self._entries[0].start_chars < self._sent_chars):
            sent.append(self._entries.popleft())
        return sent
