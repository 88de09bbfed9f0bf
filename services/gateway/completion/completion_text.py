"""From one completion's tokens to its text: detokenizing, stop strings, log probabilities."""

from collections import deque

from services.gateway.tokenizing.detokenizer import Detokenizer
from services.gateway.tokenizing.stop_strings import StopStrings
from shared.messages import TokenLogprobs


class LogprobEntry:
    """One generated token with its log probabilities and its place in the text."""

    __slots__ = ("logprobs", "start_chars", "token")

    def __init__(self, token: int, start_chars: int, logprobs: TokenLogprobs) -> None:
        self.token = token
        self.start_chars = start_chars
        self.logprobs = logprobs


class CompletionText:
    """The text of one completion as it grows."""

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
        self._waiting: deque[LogprobEntry] = deque()
        self.tokens_past_stop = 0
        """How many of the tokens last added came after the stop string."""

    def add(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> tuple[str, bool]:
        """Take new tokens; a stop id becomes no text.

        Returns:
            The text that may be sent now, and whether a stop string ended the completion.
        """
        text = ""
        is_stopped = False
        for place, token in enumerate(tokens):
            if token in self._stop_ids:
                break
            if self._has_logprobs and place < len(logprobs):
                self._waiting.append(LogprobEntry(token, self._decoded_chars, logprobs[place]))
            piece = self._detokenizer.add(token)
            self._decoded_chars += len(piece)
            if self._stops is not None and piece:
                piece, is_stopped = self._stops.push(piece)
            text += piece
            if is_stopped:
                self.tokens_past_stop = len(tokens) - place - 1
                break
        self._sent_chars += len(text)
        return text, is_stopped

    def finish(self) -> tuple[str, bool]:
        """Return the rest of the text, as `add`: the completion ended by itself."""
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
        """Return the entries whose text was sent and that were not returned before.

        Args:
            is_final: the completion ended by itself, so that entries without text are due too.
        """
        taken: list[LogprobEntry] = []
        while self._waiting and (is_final or self._waiting[0].start_chars < self._sent_chars):
            taken.append(self._waiting.popleft())
        return taken
