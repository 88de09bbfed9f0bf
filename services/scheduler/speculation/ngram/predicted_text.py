"""Text with a prediction. Owns where a predicted completion stands, so that matches find it."""

from array import array
from collections.abc import Sequence

from services.scheduler.speculation.ngram.proposer import MATCHED_MAX


class PredictedText:
    """Text in which the n-gram search finds drafts for a sequence with a predicted completion.

    It is the prompt, the prediction, the prompt's last tokens again, and the completion so far. So
    the search first finds the end of the prompt, and proposes the prediction, which stands after
    it; where the completion has left the prediction, it finds the place where both go on alike.
    """

    def __init__(
        self, tokens: Sequence[int], prompt_tokens: int, prediction: Sequence[int]
    ) -> None:
        """Copy the prompt.

        Args:
            tokens: all tokens of the sequence, which only grow.
            prompt_tokens: length of its prompt.
            prediction: token ids that the completion may have.
        """
        self._tokens = tokens
        self._copied = prompt_tokens
        self.text = array("i", tokens[:prompt_tokens])
        """The text, up to the last `update`."""
        self.text.extend(prediction)
        self.text.extend(tokens[max(0, prompt_tokens - MATCHED_MAX) : prompt_tokens])

    def update(self) -> None:
        """Add the sequence's new tokens to the text."""
        self.text.extend(self._tokens[self._copied :])
        self._copied = len(self._tokens)
