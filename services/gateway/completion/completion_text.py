"""Text of one completion: detokenizing, stop strings and log probabilities of its tokens."""

import dataclasses
from collections import deque
from collections.abc import Iterator

from services.gateway.tokenizing.detokenizer import Detokenizer
from services.gateway.tokenizing.stop_strings import StopStrings
from shared.messages import TokenLogprobs


@dataclasses.dataclass(slots=True)
class LogprobEntry:
    """One generated token with its log probabilities and the position of its text."""

    token: int
    start_chars: int
    """Characters of the completion before this token's text."""
    logprobs: TokenLogprobs

    def alternatives(self) -> Iterator[tuple[int, float]]:
        """Return (token id, log probability) of the most likely tokens here, likeliest first."""
        return zip(self.logprobs.top_ids, self.logprobs.top_logprobs, strict=True)


class CompletionText:
    """Text of one completion: decodes its tokens and cuts the text before the first stop string."""

    def __init__(
        self, detokenizer: Detokenizer, stop_ids: frozenset[int], stops: list[str]
    ) -> None:
        """Begin an empty text.

        Args:
            detokenizer: a new decoder, used for this completion only.
            stop_ids: token ids that end the completion and become no text.
            stops: stop strings; [] for none.
        """
        self._detokenizer = detokenizer
        self._stop_ids = stop_ids
        self._stops = StopStrings(stops)
        self._decoded_chars = 0
        self._sent_chars = 0
        self._entries: deque[LogprobEntry] = deque()
        self.tokens_after_stop = 0
        """Tokens of the last `add` that came after the stop string."""

    def add(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> tuple[str, bool]:
        """Decode the next tokens, up to a stop id or a stop string.

        Args:
            tokens: token ids in order.
            logprobs: one entry per token; [] if none were requested.

        Returns:
            The text that can be sent now, and whether a stop string ended the completion. Text that
            may be the beginning of a stop string or ends inside a character is held back.
        """
        text = ""
        is_stopped = False
        for position, token in enumerate(tokens):
            if token in self._stop_ids:
                break
            if position < len(logprobs):
                self._entries.append(LogprobEntry(token, self._decoded_chars, logprobs[position]))
            piece = self._detokenizer.add(token)
            self._decoded_chars += len(piece)
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
