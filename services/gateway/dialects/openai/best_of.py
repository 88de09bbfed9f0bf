"""Best completions of several. Owns their choice by mean log probability; samples nothing."""

import dataclasses
import math

from services.gateway.completion.generation import Generation
from services.gateway.completion.serializer import CollectedChoice, Pieces, ResponseMetadata
from services.gateway.dialects.openai.serializers import TextCompletionSerializer
from services.gateway.tokenizing.tokenizer import Tokenizer
from shared.messages import TokenLogprobs


class BestOfFormat(TextCompletionSerializer):
    """JSON of text completions of which a body shows only the best of each prompt."""

    def __init__(
        self,
        metadata: ResponseMetadata,
        tokenizer: Tokenizer,
        echoes: list[str],
        *,
        shown: int,
        sampled: int,
        shows_logprobs: bool,
    ) -> None:
        """Begin without log probabilities.

        Args:
            metadata: fields of the body.
            tokenizer: the model's tokenizer, for the text of tokens with log probabilities.
            echoes: the prompt of each sampled choice; [] without `echo`.
            shown: choices per prompt in the body.
            sampled: choices per prompt that are generated.
            shows_logprobs: the client wants log probabilities too.
        """
        super().__init__(metadata, tokenizer, echoes, includes_usage=True)
        self._shown = shown
        self._sampled = sampled
        self._shows_logprobs = shows_logprobs
        if not shows_logprobs:
            self.logprob_lists = 0
        self._sums: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def logprobs_json(
        self, index: int, token: int, start_chars: int, logprobs: TokenLogprobs
    ) -> tuple[bytes, ...]:
        """Add the token's log probability to its choice; return its elements if they are shown."""
        self._sums[index] = self._sums.get(index, 0.0) + logprobs.logprob
        self._counts[index] = self._counts.get(index, 0) + 1
        if not self._shows_logprobs:
            return ()
        return super().logprobs_json(index, token, start_chars, logprobs)

    def body(self, choices: list[CollectedChoice], generation: Generation) -> Pieces:
        """Return the body with the best choices of each prompt, the best first."""
        best: list[CollectedChoice] = []
        for start in range(0, len(choices), self._sampled):
            group = choices[start : start + self._sampled]
            group.sort(key=lambda choice: self._mean(choice.index), reverse=True)
            best += group[: self._shown]
        if self._echoes:
            self._echoes = [self._echoes[choice.index] for choice in best]
        numbered = [
            dataclasses.replace(
                choice, index=index, logprobs=choice.logprobs if self._shows_logprobs else None
            )
            for index, choice in enumerate(best)
        ]
        return super().body(numbered, generation)

    def _mean(self, index: int) -> float:
        """Return a choice's mean log probability per token; an empty one is the worst."""
        count = self._counts.get(index, 0)
        return self._sums[index] / count if count else -math.inf
